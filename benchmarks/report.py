"""``python -m benchmarks.report [FOLDER]``: tables and plots of the result files in FOLDER.

FOLDER defaults to ``benchmarks/results``. Each device's folder gets plots and a ``report.md`` with
all tables. The command prints the first cases, a line each, and the rows that it rejects because
their samples differ too much. With ``--documents`` it also draws the figure of README and fills the
blocks of the documents: cog runs the calls in their markers.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import figure, tables, text
from benchmarks.asynchronous import WAYS as WAYS_AHEAD
from benchmarks.providers import EVERY
from benchmarks.providers.ours import VARIANTS
from benchmarks.results import MOST_SPREAD, RESULTS, ROOT, Group, load
from benchmarks.shapes import MODELS, REAL, WORKS
from benchmarks.tables import executed  # noqa: F401 (a block of the documents)
from benchmarks.test_optimizers import WAYS
from benchmarks.test_states import LAST, STATES

DEVICES = {"cuda": "On a GPU", "cpu": "On a CPU"}
DOCUMENTS = (
    "README.md",
    "benchmarks/README.md",
    "docs/choosing.md",
    "docs/rounding.md",
    "benchmarks/results.md",
    "benchmarks/kernels.md",
    "benchmarks/method.md",
    "docs/guides/trl.md",
    "docs/guides/limited-vram.md",
    "docs/guides/training.md",
    "docs/guides/exactness.md",
    "docs/guides/real-model.md",
    "docs/guides/optimizers.md",
    "docs/guides/asynchronous.md",
    "docs/guides/vllm.md",
)
_DRAWN: tuple[dict[str, Any], ...] = (
    {"kind": "cuda", "work": "dapo", "model": "qwen3-1.7b", "tokens": 8192, "dtype": "bf16"},
    {"kind": "cuda", "work": "dapo", "model": "qwen3-8b", "tokens": 8192, "dtype": "bf16"},
)
# the modules of the calls in the blocks
_PROLOGUE = "\n".join(
    f"from {module} import *"
    for module in ("benchmarks.report", "docs.tables.vram", "docs.tables.state_bytes")
)
_VIEWS = {
    "standings": ("All providers over all cases", tables.standings),
    "cases": ("One line per case", tables.cases),
}
_HIDDEN_SPARSE = "a sparse gradient of the hidden states"
_BOTH_SPARSE = "sparse gradients of hidden states and head"
_PRINTED = 14  # cases of a device
_REAL_MODELS = {"smollm2-135m": "SmolLM2-135M-Instruct"}
# pairs of setups that are compared
_COMPARED = (
    ("ours", "trl", "in our trainer"),
    ("trl-our-head", "trl", "in TRL with our head"),
    ("ours-lora", "trl-lora", "in our trainer with LoRA"),
)


def show(block: str, kind: str) -> str:
    """Write a view over all cases or the tables of a benchmark, for the newest device of a kind.

    The kinds are "cpu" and "cuda". Without a result this and all other blocks are empty.
    """
    groups = newest(kind)[1]
    return _VIEWS[block][1](groups) if block in _VIEWS else tables.show(block, groups)


def section(benchmark: str) -> str:
    """Write the heading, the text and the tables of a benchmark, or nothing without a result."""
    layout = tables.LAYOUTS[benchmark]
    shown = [
        f"{title}:\n\n{of_kind}"
        for kind, title in DEVICES.items()
        if (of_kind := show(benchmark, kind))
    ]
    return "\n\n".join([f"## {layout.title}", layout.about, *shown]) if shown else ""


def unmeasured() -> str:
    """List the benchmarks that have cases for a kind of device but no result of the newest one."""
    lines = []
    for kind, suites in {"cuda": {"gpu", "gpu-full"}, "cpu": {"cpu"}}.items():
        measured = {group.benchmark for group in newest(kind)[1]}
        names = [
            f"`test_{name}.py` ({layout.title})"
            for name, layout in tables.LAYOUTS.items()
            if name not in measured and suites & _suites(name)
        ]
        lines += [f"* {DEVICES[kind]}: {', '.join(names)}."] if names else []
    return "\n".join(lines) or "Every benchmark has a result."


def _suites(benchmark: str) -> set[str]:
    """Read the names of a benchmark's suites; importing all benchmarks takes long."""
    tree = ast.parse((ROOT / f"benchmarks/test_{benchmark}.py").read_text())
    [cases] = [x for x in tree.body if ast.unparse(x).startswith(("CASES =", "CASES:"))]
    keys = [key for x in ast.walk(cases) if isinstance(x, ast.Dict) for key in x.keys]
    return {key.value for key in keys if isinstance(key, ast.Constant)}


def headline(kind: str, work: str, model: str, tokens: int) -> str:
    """Write one case of the heads in every dtype: our defaults and all other providers."""
    found = [
        replace(group, rows=[row for row in group.rows if tables.is_quoted(row.provider)])
        for group in _heads(kind, work=work, model=model, tokens=tokens)
    ]
    if not found:
        return ""
    shown = text.markdown(tables.frame(found, tables.LAYOUTS["heads"]))
    return f"{tables.caption(found)}\n\n{shown}"


def _heads(kind: str, **facts: str | int) -> list[Group]:
    """Return the newest device's cases of the heads that have these facts."""
    found = [group for group in newest(kind)[1] if group.benchmark == "heads"]
    return tables.in_order(group for group in found if facts.items() <= group.facts.items())


def next_to_others(kind: str) -> str:
    """Write how the two schedules compare with TRL's fused head and Liger's Triton loss."""
    drawn = ("ours", "ours-two-pass", "trl", "liger-triton")
    cases = [
        group
        for group in _heads(kind, work="dapo", dtype="bf16")
        if all((row := group[name]) and row.median for name in drawn)
    ]
    if not cases:
        return ""
    rows = {name: [group[name] for group in cases] for name in drawn}

    def times(name: str, other: str) -> str:
        pairs = zip(rows[name], rows[other], strict=True)
        return text.percents([own.median / their.median for own, their in pairs])

    def sizes(name: str, other: str) -> str:
        pairs = zip(rows[name], rows[other], strict=True)
        return text.percents([own.extra_bytes / their.extra_bytes for own, their in pairs])

    def error(name: str) -> str:
        return text.error(max(row.worst("dhidden", "dweight") for row in rows[name]))

    models = " and ".join({group.facts["model"].title(): None for group in cases})
    tokens = [group.facts["tokens"] for group in cases]
    where = f"On one {cases[0].where}, heads of {models}, bf16"
    return "\n".join([
        f"{where}, {min(tokens):,} to {max(tokens):,} tokens:",
        "",
        f"* **Default:** {times('ours', 'trl')} of the time of TRL's fused head, and "
        f"{sizes('ours', 'trl')} of its memory.",
        f'* **`schedule="two_pass"`:** {times("ours-two-pass", "trl")} of its time, and '
        f"{sizes('ours-two-pass', 'trl')} of its memory.",
        f"* **Gradient error against fp64:** {error('ours')}. With TRL, Liger and eager PyTorch it "
        f"is {error('trl')}, because they round the logits to bf16.",
        f"* **Where we lose:** Liger's Triton loss needs {times('liger-triton', 'ours')} of the "
        f"time of our default, and {sizes('liger-triton', 'ours')} of its memory. `two_pass` needs "
        f"{sizes('ours-two-pass', 'liger-triton')} of the memory of Liger's loss.",
    ])  # fmt: skip


def ratio_errors(kind: str) -> str:
    """Write the error on real text of an importance ratio that should be 1, by library."""
    names: dict[str, list[str]] = {}  # by their errors, as they are written
    where = ""
    for group in newest(kind)[1]:
        if group.benchmark != "accuracy" or group.facts["dtype"] != "bf16":
            continue
        if group.facts["inputs"] == REAL:
            where = group.where
            for name, (label, _) in figure.LIBRARIES.items():
                row = group[name]
                if row and "ratio noise" in row.info:
                    mean, largest = map(text.percent, row.info["ratio noise"])
                    names.setdefault(f"{mean} on average (up to {largest})", []).append(label)
    if not names:
        return ""
    said = (f"{errors} with {text.listed(labels)}" for errors, labels in names.items())
    return (
        "Before any update, the importance ratio of every token should be 1. On text generated by "
        "SmolLM2-135M-Instruct, with its head in bf16, the error of the ratio is "
        f"{', and '.join(said)} ({where})."
    )


def sparse_step(kind: str) -> str:
    """Write the time and the error of a sparse backward on real text, next to an exact one.

    The sentence has only the times that are known and steady.
    """
    for group in newest(kind)[1]:
        facts = group.facts
        if group.benchmark != "sparse" or facts["dtype"] != "bf16" or facts["work"] != "dapo":
            continue
        names = ("ours", "ours-sparse-hidden", "ours-sparse", "eager")
        rows = [group[name] for name in names]
        if facts["inputs"] != REAL or not all(row and row.runs for row in rows):
            continue
        exact, hidden, both, eager = rows
        times = [
            f"{text.ratio(ratio)} of the time with {way}"
            for row, way in ((hidden, _HIDDEN_SPARSE), (both, _BOTH_SPARSE))
            if (ratio := group.ratio(row, "ours"))
        ]
        step = f" Compared with an exact step, a step needs {' and '.join(times)}." if times else ""
        off = [
            text.percent(max(row.errors[name] for name in ("dhidden", "dweight")))
            for row in (both, exact, eager)
        ]
        return (
            f"On text generated by {_REAL_MODELS[facts['model']]}, a sparse backward keeps "
            f"{both.info['entries'][0]:.0f} of {facts['vocabulary']:,} entries per token. In bf16, "
            f"its gradients have a relative error of {off[0]}, an exact backward's {off[1]}, and "
            f"eager PyTorch's {off[2]}.{step} Measured on {group.where}."
        )
    return ""


def optimizers(kind: str) -> str:
    """Write the results of whole runs with exact and sparse gradients, averaged over seeds."""
    groups, runs = _runs(kind, "optimizers")
    if not runs:
        return ""
    lines = []
    for way, infos in ((way, runs[way]) for way in WAYS if way in runs):
        rewards = [info["held_out"][-1] for info in infos]
        lines.append({
            "": way.split("-")[0],
            "gradients": WAYS[way].note,
            "held-out reward": f"{fmean(rewards):.3f}",
            "of each seed": text.thousandths(rewards),
            "entropy": f"{fmean(fmean(info['entropies'][-5:]) for info in infos):.2f}",
            "change of frequent rows": text.error(fmean(x["frequent_rows"] for x in infos)),
            "of rare rows": text.error(fmean(info["rare_rows"] for info in infos)),
        })  # fmt: skip
    before = fmean(info["held_out"][0] for infos in runs.values() for info in infos)
    caption = f"{tables.caption(groups)} The held-out reward was {before:.3f} before."
    return f"{caption}\n\n{text.markdown(lines)}"


def states(kind: str) -> str:
    """Write the results of whole runs with fewer bits of weights and states, over seeds."""
    groups, runs = _runs(kind, "states")
    _, updates = _runs(kind, "updates")
    if not runs:
        return ""
    lines = []
    for name in (name for name in STATES if name in runs):
        rewards = [info["rewards"] for info in runs[name]]
        shares = [info["kept"] for info in updates.get(name, ())]
        ends = [fmean(of_run[-LAST:]) for of_run in rewards]
        lines.append({
            "": STATES[name].note,
            "mean reward": text.mean_and_spread([*map(fmean, rewards)]),
            f"of the last {LAST} steps": text.mean_and_spread(ends),
            "held out": text.mean_and_spread([info["held_out"][-1] for info in runs[name]]),
            "small updates kept": f"{fmean(shares):.2f}" if shares else "",
        })  # fmt: skip
    one, seeds = groups[0], len({group.facts["seed"] for group in groups})
    caption = f"{one.about}, {seeds} seeds: the mean and its spread; {one.where}; {one.source}."
    return f"{caption}\n\n{text.markdown(lines)}"


def asynchronous(kind: str) -> str:
    """Write the savings and costs of batches ahead of training, over the seeds of their runs."""
    groups, runs = _runs(kind, "asynchronous")
    if not runs:
        return ""
    base, lines = [info["seconds"] for info in runs["0-ahead"]], []
    for name, infos in runs.items():
        seconds = [info["seconds"] for info in infos]
        ratios = [own / other for own, other in zip(seconds, base, strict=True)]
        rewards = [fmean(info["rewards"][-LAST:]) for info in infos]
        lines.append({
            "": WAYS_AHEAD[name].note,
            "seconds per step": text.spread(seconds),
            "of none ahead": text.spread(ratios),
            "age of tokens": f"{fmean(info['staleness'] for info in infos):.2f}",
            "oldest": str(max(info["oldest"] for info in infos)),
            "tokens left out": text.percent(fmean(info["left_out"] for info in infos)),
            f"reward of the last {LAST} steps": f"{fmean(rewards):.3f}",
            "of each seed": text.thousandths(rewards),
        })  # fmt: skip
    one = groups[0]
    caption = f"{one.about}. {len(groups)} seeds; {one.where}; {one.source}."
    return f"{caption}\n\n{text.markdown(lines)}"


def _runs(kind: str, benchmark: str) -> tuple[list[Group], dict[str, list[dict[str, Any]]]]:
    """Return a benchmark's groups, and the logs of its runs by provider, in the order of seeds."""
    groups = [group for group in newest(kind)[1] if group.benchmark == benchmark]
    runs: dict[str, list[dict[str, Any]]] = {}
    for group in sorted(groups, key=lambda group: group.facts["seed"]):
        for row in filter(lambda row: row.runs, group.rows):
            seconds = fmean(row.seconds) if row.seconds else 0.0
            runs.setdefault(row.provider, []).append(row.info | {"seconds": seconds})
    return groups, runs


def plots(kind: str, folder: str) -> str:
    """Link to the pictures of the newest device of a kind; ``folder`` holds the results."""
    from benchmarks.plots import PLOTS

    slug, _ = newest(kind)
    there = [name for name in PLOTS if slug and (RESULTS / slug / f"{name}.png").exists()]
    links = [f"![{PLOTS[name][0]}]({folder}/{slug}/{name}.png)" for name in there]
    return "\n\n".join(links)


def picture(name: str, kind: str, folder: str) -> str:
    """Link to a picture of a pretrained model, for the newest device of a kind."""
    from benchmarks.plots import PICTURES

    slug, _ = newest(kind)
    there = (RESULTS / slug / f"{name}.png").exists()
    return f"![{PICTURES[name][0]}]({folder}/{slug}/{name}.png)" if there else ""


def curve_differences(kind: str) -> str:
    """Write how far the gradient norms of a pretrained model are from TRL's with the same seed.

    If ratios are 1, the loss does not depend on the log-probabilities, but its gradient does.
    """
    curves = [group for group in newest(kind)[1] if group.benchmark == "curves"]
    norms = {
        (row.provider, group.facts["seed"]): row.info["gradient_norms"]
        for group in curves
        for row in group.rows
        if row.runs
    }
    said = []
    for name, their_name, label in _COMPARED:
        seeds = [seed for provider, seed in norms if provider == name]
        differences = [
            abs(own - their) / (max(own, their) or 1)  # both 0: a step without signal
            for seed in seeds
            if (their_name, seed) in norms
            for own, their in zip(norms[name, seed], norms[their_name, seed], strict=True)
        ]
        if differences:
            said.append(f"{text.error(max(differences))} {label} ({len(differences)} steps)")
    if not said:
        return ""
    largest = "The largest relative difference from TRL's gradient norm in any step"
    return f"{largest} is {', '.join(said)}."


def step_ratios(kind: str) -> str:
    """Write time and peak memory of a pretrained model's step, relative to TRL's, in turns."""
    said: list[str] = []
    where = ""
    for group in newest(kind)[1]:
        for name, their_name, label in _COMPARED:
            row, their = group[name], group[their_name]
            if group.benchmark == "real" and row and their and row.median and their.median:
                where = group.where
                pairs = zip(row.seconds, their.seconds, strict=True)
                time = text.spread([own / other for own, other in pairs])
                memory = text.ratio(row.info["peak_bytes"] / their.info["peak_bytes"])
                said.append(f"{time} of the time and {memory} of the memory {label}")
    if not said:
        return ""
    return f"Compared with TRL's step, the same step needs {'; '.join(said)} ({where})."


def newest(kind: str) -> tuple[str, list[Group]]:
    """Return the folder's name and the groups of the device that was measured last."""
    dates = {
        max(group.environment["date"] for group in groups): (slug, groups)
        for slug, groups in _stored().items()
        if groups[0].environment["kind"] == kind
    }
    return dates[max(dates)] if dates else ("", [])


_stored = cache(load)


def steady_rule() -> str:
    return (
        f"* If the slowest sample of a row is more than {MOST_SPREAD:g} times the fastest one, the "
        'machine was busy. The row then shows "unsteady", and its times are in no ranking, '
        "sentence, or plot. Its errors and memory stay. `make results` lists these rows."
    )


def memory_rule() -> str:
    return (
        f"* A ratio to our memory is shown only if our memory is at least "
        f"{text.percent(tables.LEAST_SHARE)} of the largest one in the case. Dividing by less, "
        "such as a few MiB next to gigabytes, gives a number without meaning."
    )


def models() -> str:
    return text.markdown([
        {
            "": f"`{model.name}`",
            "hidden": str(model.hidden),
            "vocabulary": str(model.vocabulary),
            "softcap": f"{model.softcap:g}" if model.softcap else "",
        }
        for model in MODELS.values()
    ])  # fmt: skip


def works() -> str:
    return "\n".join(f"* `{name}`: {work.title}" for name, work in WORKS.items())


def providers() -> str:
    """List the providers, without the variants that their own table describes."""
    listed = (provider for provider in EVERY.values() if provider not in VARIANTS)
    return "\n".join(f"* `{provider.name}`: {provider.note}" for provider in listed)


def write_documents(check: bool = False) -> int:
    """Draw the figure and fill the blocks, or only check them; not 0 if one would change."""
    from cogapp import Cog

    drawn = [group for case in _DRAWN for group in _heads(**case)]
    for name, picture in figure.pictures(drawn).items():
        path = ROOT / "docs" / "images" / name
        if not check:
            path.write_text(picture)
        elif path.read_text() != picture:
            print(f"{path.relative_to(ROOT)}: would change")
            return 1
    paths = [str(ROOT / name) for name in DOCUMENTS]
    options = ["--check" if check else "-r", "-P", "-p", _PROLOGUE]
    return Cog().main(["cog", *options, *paths])


def report(groups: Sequence[Group]) -> str:
    """Write all results of a device, with the fastest and the slowest sample of each row."""
    written = {title: view(groups) for title, view in _VIEWS.values()}
    written |= {
        x.title: tables.show(name, groups, samples=True) for name, x in tables.LAYOUTS.items()
    }
    parts = [f"## {title}\n\n{shown}" for title, shown in written.items() if shown]
    return "\n\n".join([f"# {groups[0].where}", *parts]) + "\n"


def rejected(groups: Sequence[Group]) -> str:
    """List the rows without a time because their samples differ too much, a line each."""
    names = ("work", "model", "tokens", "dtype", "inputs")
    lines = []
    for group in groups:
        facts = ", ".join(str(group.facts[name]) for name in names if name in group.facts)
        for row in (row for row in group.rows if row.runs and row.unsteady):
            lines.append(f"  {group.benchmark}: {facts}: {row.provider} {row.spread:.2f}")
    title = f"{len(lines)} rows are unsteady and have no time: slowest / fastest > {MOST_SPREAD:g}"
    return "\n".join([title, *lines]) if lines else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS, metavar="FOLDER")
    parser.add_argument("--documents", action="store_true", help="fill the documents' blocks")
    arguments = parser.parse_args()
    folder = arguments.folder
    if not folder.is_dir():
        parser.error(f"FOLDER: expected a folder of results, got {folder}")
    draws = importlib.util.find_spec("matplotlib") is not None
    if draws:
        from benchmarks.plots import save_plots
    else:
        print("matplotlib is not installed: the old plots stay")
    for slug, groups in load(folder).items():
        if draws:
            save_plots(groups, folder / slug)
        (folder / slug / "report.md").write_text(report(groups))
        print(f"{folder / slug}: {len(groups)} cases of {len({x.source for x in groups})} runs")
        print(tables.cases([group for group in groups if group.benchmark == "heads"][:_PRINTED]))
        if unsteady := rejected(groups):
            print(unsteady)
    if arguments.documents and (code := write_documents()):
        sys.exit(code)


if __name__ == "__main__":
    main()
