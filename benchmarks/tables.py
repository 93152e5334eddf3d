"""Measurements as tables: one way to write any group, and two views over all cases of the heads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import text
from benchmarks.providers import PROVIDERS
from benchmarks.providers.base import is_ours
from benchmarks.results import RESULTS, Group, Row
from benchmarks.shapes import DTYPES, INPUTS, MODELS, WORKS
from benchmarks.text import Lines

BARE = "bare-gemms"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as baselines do


@dataclass(frozen=True)
class Layout:
    """How the groups of one benchmark are shown: times, the cells of the rows, and errors."""

    title: str
    base: str = ""  # whose time is written in seconds, and all others' as a ratio to it
    beside: bool = False  # the dtypes of a case stand beside one another
    together: bool = False  # all groups in one table
    contest: bool = False  # sorted, beside ours, and the least is bold
    notes: bool = False  # a column says what each row is
    errors: bool = False  # a column lists the errors


LAYOUTS = {
    "heads": Layout("Every case", BARE, beside=True, contest=True),
    "training": Layout("Training step", contest=True, errors=True),
    "vocabulary": Layout("Step of a model with a large vocabulary", contest=True, errors=True),
    "padding": Layout("Padding of a generation batch", notes=True, errors=True),
    "prefixes": Layout("Completions that begin alike", notes=True, errors=True),
    "divergence": Layout("Divergence from a teacher", BARE, notes=True),
    "savings": Layout("What is saved", notes=True, errors=True),
    "products": Layout("Products", "logits bf16", notes=True),
    "tiles": Layout("Tiles of the GPU kernels", contest=True, notes=True),
    "row_kernel": Layout("The kernel that reads logits", notes=True, errors=True),
    "anchored": Layout("The GEMM that stores softmax numerators", notes=True, errors=True),
    "waits": Layout("What the GPU waits for", notes=True),
    "exactness": Layout("Exactness on hard inputs"),
    "skipping": Layout("Rows without a gradient", BARE),
    "lora": Layout("LoRA steps of two trainers", errors=True),
    "activations": Layout("What a body keeps", "plain", notes=True, errors=True),
    "real": Layout("Steps of a pretrained model", notes=True, errors=True),
    "curves": Layout("Whole runs of a pretrained model", together=True, notes=True),
    "optimizers": Layout("Sparse backwards by optimizer", together=True, notes=True),
    "states": Layout("Weights and optimizer states in fewer bits", together=True, notes=True),
    "updates": Layout("Small steps in fewer bits", together=True, notes=True),
    "asynchronous": Layout("Batches ahead of training", "0-ahead", together=True, notes=True),
    "rounding": Layout("Rounding of the weight's gradient", notes=True),
    "sparse": Layout("Steps with a sparse backward", BARE, notes=True),
    "entries": Layout("The passes of a sparse backward", notes=True, errors=True),
    "backwards": Layout("Backwards", BARE, beside=True),
    "sharded": Layout("Over several ranks", "one process", notes=True, errors=True),
    "hosts": Layout("In other trainers", "theirs", together=True, errors=True),
    "rollouts": Layout("Generation and the rest of a step", notes=True),
    "sparsity": Layout("Sparsity of the softmax"),
    "mismatch": Layout("An engine's log-probabilities and the trainer's", notes=True),
    "routing": Layout("The same with a mixture of experts", notes=True),
    "accuracy": Layout("Errors on a policy's distributions", contest=True),
}


def is_quoted(provider: str) -> bool:
    """Return whether tables of one case have it: of ours the defaults only."""
    return provider in QUOTED or not (is_ours(provider) or _is_queued(provider))


def competes(provider: str) -> bool:
    """Return whether it may be the best of a table: a yardstick may not, nor who had a start."""
    return not (provider.startswith(BARE) or _is_queued(provider))


def _is_queued(provider: str) -> bool:
    return provider in PROVIDERS and PROVIDERS[provider].queued


def show(
    benchmark: str, groups: Sequence[Group], write: Callable[[Lines], str] = text.markdown
) -> str:
    """Show the groups of one benchmark; below each table who is not in it, and why."""
    layout = LAYOUTS[benchmark]
    tables: dict[str, list[Group]] = {}
    for group in in_order(group for group in groups if group.benchmark == benchmark):
        facts = {**group.facts, "dtype": ""} if layout.beside else group.facts
        tables.setdefault("" if layout.together else json.dumps(facts), []).append(group)
    parts = []
    for found in tables.values():
        parts += [caption(found), write(lines(found, layout)), missing(found)]
    return "\n\n".join(filter(None, parts))


def lines(groups: Sequence[Group], layout: Layout) -> Lines:
    """Write a line for each work and provider; each dtype has its columns."""
    found: dict[str, dict[tuple[str, str], tuple[Group, Row]]] = {}  # by dtype and place
    first: dict[tuple[str, str], tuple[Group, Row]] = {}
    for group in groups:
        of_dtype = found.setdefault(group.facts["dtype"], {})
        for row in filter(lambda row: row.shown, group.rows):
            place = row.info.get("work", ""), row.provider
            of_dtype[place] = group, row
            first.setdefault(place, (group, row))
    places = sorted(first, key=lambda place: _rank(*first[place])) if layout.contest else [*first]
    works = [work for work, _ in places]
    columns = [
        ["", *("" if before == work else work for before, work in pairwise(["", *works]))],
        ["", *(provider for _, provider in places)],
        ["", *(first[place][1].note if layout.notes else "" for place in places)],
    ]
    columns = [column for column in columns if any(column)]
    for dtype, each in found.items():
        prefix = f"{dtype}: " if len(found) > 1 else ""
        cells = [_cells(*each[place], layout) if place in each else {} for place in places]
        titles = dict.fromkeys(title for of_row in cells for title in of_row)
        for title in sorted(titles, key="errors".__eq__):  # they are last
            written = [of_row.get(title, "") for of_row in cells]
            if layout.contest:
                written = text.bold_least(written, [competes(name) for _, name in places])
            columns.append([prefix + title, *written])
            prefix = ""
    return [list(line) for line in zip(*columns, strict=True)]


def _rank(group: Group, row: Row) -> tuple[int, float]:
    """Return where a row stands: defaults before variants, by time, else by how exact it is."""
    size = row.median
    if size is None:
        size = row.errors.get("dhidden", row.info.get("ratio noise", [None])[0])
    return _place(row.provider), math.inf if size is None or not row.runs else size


def _place(provider: str) -> int:
    """Place the bare GEMMs first, then ours, the defaults of the others, and variants."""
    if provider in (BARE, "ours"):
        return (BARE, "ours").index(provider)
    return 2 if provider in PROVIDERS and PROVIDERS[provider].default else 3


def _cells(group: Group, row: Row, layout: Layout) -> dict[str, str]:
    """Return what is written of a row, by column."""
    base = row.info.get("base", layout.base)
    time = "x bare" if base == BARE else "time"
    if not row.runs:
        return {time: "FAILED"}
    cells = {time: text.duration(row.median)}
    ratio = text.ratio(group.ratio(row, base))
    if ratio and row.provider != base:
        of = f" of {base}" * ("base" in row.info)
        cells[time] = ratio if base == BARE else f"x {ratio}{of}"
    elif ratio and base == BARE:
        cells[time] = f"{ratio} ({cells[time]})"
    if layout.contest:
        cells["x ours"] = text.ratio(group.ratio(row, "ours"))
    errors = row.errors.items() if layout.errors else ()
    cells["errors"] = ", ".join(f"{name} {text.error(x)}" for name, x in errors)
    return cells | row.cells


def caption(groups: Sequence[Group]) -> str:
    """Write what was measured, where, when and of which commit."""
    one = groups[0]
    facts = one.facts
    shape = f"D = {facts['hidden']}, V = {facts['vocabulary']}" if "hidden" in facts else ""
    if facts.get("softcap") is not None:
        shape += f", softcap {facts['softcap']:g}"
    dtypes = {group.facts["dtype"] for group in groups}
    said = [
        WORKS[facts["work"]].title if facts.get("work") in WORKS else "",
        facts.get("kernel", ""),
        facts["model"] + (f" ({shape})" if shape else ""),
        f"T = {facts['tokens']}" if facts["tokens"] else "",
        facts["dtype"] if len(dtypes) == 1 else "",
        facts["inputs"] + " inputs" if "inputs" in facts else "",
        one.about,
        one.where,
        one.source,
    ]
    return f"{'; '.join(filter(None, said))}."


def missing(groups: Sequence[Group]) -> str:
    """Say who is not in a table, by reason; and who is wrong."""
    everywhere = {group.facts["dtype"] for group in groups}
    parts = []
    for title, state in {"Not here": "absent", "Not able": "unable", "Wrong": "wrong"}.items():
        reasons: dict[str, dict[str, set[str]]] = {}  # to providers, to dtypes
        for group in groups:
            for row in group.rows:
                if row.state == state:
                    who = reasons.setdefault(row.reason, {}).setdefault(row.provider, set())
                    who.add(group.facts["dtype"])
        listed = []
        for why, who in reasons.items():
            names = (n if x == everywhere else f"{n} in {min(x)}" for n, x in who.items())
            listed.append(f"{', '.join(names)} ({why})")
        parts += [f"{title}: {'; '.join(listed)}."] if listed else []
    return " ".join(parts)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort by work, then as models, inputs and dtypes are listed, then by seed and setup."""

    def place(group: Group) -> tuple[Any, ...]:
        def index(name: str, known: Iterable[str]) -> int:
            listed, found = list(known), group.facts.get(name)
            return listed.index(found) if found in listed else len(listed)

        inputs = (index("inputs", INPUTS) - 1) % len(INPUTS)  # the flat tail last
        model = index("model", MODELS), group.facts["tokens"]
        listed = index("work", WORKS), *model, inputs, index("dtype", DTYPES)
        return listed, group.facts.get("seed", 0), group.facts.get("setup", "")

    return sorted(groups, key=place)


def cases(groups: Sequence[Group]) -> str:
    """Show a line per case of the heads: ours and the best baseline, in time and in memory."""
    header = [
        "work", "model", "T", "dtype", "bare",
        "x bare: ours", "ours-input", "fastest baseline",
        "extra MiB: ours", "ours-input", "leanest baseline",
    ]  # fmt: skip
    found = in_order(group for group in groups if group.benchmark == "heads")
    return text.markdown([header, *map(_case, found)]) if found else ""


def _case(group: Group) -> list[str]:
    bare = group[BARE]
    cells = [str(group.facts[name]) for name in ("work", "model", "tokens", "dtype")]
    cells.append(text.duration(bare.median if bare else None))
    for value, write in ((_ratio(BARE), text.ratio), (lambda _, row: row.extra_bytes, text.mib)):
        sizes = {x.provider: value(group, x) for x in group.rows if x.runs}
        others = {
            n: x for n, x in sizes.items() if x is not None and competes(n) and not is_ours(n)
        }
        best = min(others, key=lambda name: others[name], default="")
        values = [*(sizes.get(provider) for provider in QUOTED), others.get(best)]
        *ours, other = text.bold_least([write(x) for x in values])
        wrong = [x is not None and not x.runs for x in map(group.__getitem__, QUOTED)]
        cells += ["FAILED" if bad else cell for bad, cell in zip(wrong, ours, strict=True)]
        cells.append(f"{other} {best}".strip())
    return cells


def standings(groups: Sequence[Group]) -> str:
    """Show a line for each provider, over all of its cases of a dtype."""
    parts = []
    for dtype in DTYPES:
        of_dtype = [x for x in groups if x.benchmark == "heads" and x.facts["dtype"] == dtype]
        if of_dtype:
            parts += [f"{dtype}, {len(of_dtype)} cases:", text.markdown(_standings(of_dtype))]
    return "\n\n".join(parts)


def _standings(groups: Sequence[Group]) -> Lines:
    pairs: dict[str, list[tuple[Group, Row]]] = {}  # by provider
    for group in groups:
        for row in filter(lambda row: row.shown, group.rows):
            pairs.setdefault(row.provider, []).append((group, row))

    def place(name: str) -> tuple[int, float]:
        ratios = [group.ratio(row, BARE) for group, row in pairs[name]]
        known = [ratio for ratio in ratios if ratio is not None]
        return _place(name), statistics.median(known or [math.inf])

    table = [["", *_STANDINGS]]
    for name in sorted(pairs, key=place):
        table.append([name])
        for value, write in _STANDINGS.values():
            found = (value(*pair) for pair in pairs[name])
            table[-1].append(write([x for x in found if x is not None]))
    return table


def _ratio(base: str) -> Callable[[Group, Row], float | None]:
    return lambda group, row: group.ratio(row, base)


def _extra_ratio(group: Group, row: Row) -> float | None:
    ours = group["ours"]
    if row.extra_bytes is None or ours is None or not ours.extra_bytes or ours.extra_bytes < 0:
        return None
    return row.extra_bytes / ours.extra_bytes


def _always(values: Sequence[bool]) -> str:
    """Write whether it holds in all cases that know."""
    failed = values.count(False)
    if 0 < failed < len(values):
        return f"all but {failed}"
    return "no" if failed else "yes" * any(values)


def _worst(*outputs: str) -> tuple[Callable[[Group, Row], Any], Callable[[list], str]]:
    return lambda group, row: row.worst(*outputs), lambda x: text.error(max(x, default=None))


# what is found in each case of a provider, and how all of that is written
_STANDINGS: dict[str, tuple[Callable[[Group, Row], Any], Callable[[list], str]]] = {
    "cases": (lambda group, row: row.median, lambda x: str(len(x))),
    "x bare": (_ratio(BARE), text.spread),
    "x ours": (_ratio("ours"), text.spread),
    "x ours-input": (_ratio("ours-input"), text.spread),
    "extra memory x ours": (_extra_ratio, text.spread),
    "value error": _worst("loss", "logprobs", "entropy"),
    "gradient error": _worst("dhidden", "dweight"),
    "same bits: again": (lambda group, row: row.info.get("repeatable"), _always),
    "in another batch": (lambda group, row: row.info.get("batch_invariant"), _always),
    "failed": (lambda group, row: None if row.runs else True, lambda x: str(len(x) or "")),
}


EXECUTED = RESULTS / "executed.json"
TARGETS = ("sm_80", "sm_90", "sm_100")


def executed(path: Path = EXECUTED) -> str:
    """Show what GPU kernels execute, which ``test_executed.py`` counts: a line for each kernel."""
    if not path.exists():
        return "not measured yet"
    found = json.loads(path.read_text())
    keys = ("provider", "with", "dtype", "kernel", "target")
    sass = {tuple(x[key] for key in keys): x for x in found["compiled"]}
    kinds = ("matrix", "vector", "transcendental", "shared", "scalar", "wait")
    moved = ("loads and stores", "bytes read", "written")
    table = [["kernel", "logits", *kinds, *moved, *TARGETS, "registers"]]
    order = list(dict.fromkeys(x["with"] for x in found["executed"]))
    for x in sorted(found["executed"], key=lambda x: (order.index(x["with"]), x["dtype"])):
        for work in x["work"]:
            count = work["instructions"]
            key = (x["provider"], x["with"], x["dtype"], work["kernel"])
            of_sass = [sass.get((*key, target)) for target in TARGETS]
            more = f", {x['with']}" if x["with"] else ""
            table.append([
                f"{x['provider']}{more}: `{work['kernel']}`",
                x["dtype"],
                *(f"{count[kind]:z.2f}" for kind in kinds),
                f"{count['load'] + count['store']:.2f}",
                *(f"{work[name]:z.1f}" for name in ("read", "written")),
                *(f"{y['instructions']:.1f}" if y else "" for y in of_sass),
                str(of_sass[1]["registers"]) if of_sass[1] else "",
            ])  # fmt: skip
    where = found["environment"]
    versions = ", ".join(f"{n} {where['versions'][n]}" for n in ("triton", "trl", "liger-kernel"))
    return f"{text.markdown(table)}\n\n{where['date'][:10]}, {where['commit'][:12]}, {versions}."
