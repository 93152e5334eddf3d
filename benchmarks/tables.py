"""Measurements as tables: one way to write any group, and two views over all cases of the heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pandas import DataFrame, Series, concat

from benchmarks import text
from benchmarks.providers import PROVIDERS
from benchmarks.providers.base import is_ours
from benchmarks.results import RESULTS, Group, Row
from benchmarks.shapes import DTYPES, INPUTS, MODELS, WORKS

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
    benchmark: str, groups: Sequence[Group], write: Callable[[DataFrame], str] = text.markdown
) -> str:
    """Show the groups of one benchmark; below each table who is not in it, and why."""
    layout = LAYOUTS[benchmark]
    tables: dict[str, list[Group]] = {}
    for group in in_order(group for group in groups if group.benchmark == benchmark):
        facts = {**group.facts, "dtype": ""} if layout.beside else group.facts
        tables.setdefault("" if layout.together else json.dumps(facts), []).append(group)
    parts = []
    for found in tables.values():
        parts += [caption(found), write(frame(found, layout)), missing(found)]
    return "\n\n".join(filter(None, parts))


def frame(groups: Sequence[Group], layout: Layout) -> DataFrame:
    """Return a line for each work and provider; each dtype has its columns."""
    found: dict[str, dict[tuple[str, str], tuple[Group, Row]]] = {}  # by dtype and place
    for group in groups:
        for row in filter(lambda row: row.shown, group.rows):
            place = row.info.get("work", ""), row.provider
            found.setdefault(group.facts["dtype"], {})[place] = group, row
    first = {place: pair for each in reversed([*found.values()]) for place, pair in each.items()}
    places = [*dict.fromkeys(place for each in found.values() for place in each)]
    if layout.contest:
        places.sort(key=lambda place: _rank(*first[place]))
    head = DataFrame(places, columns=["work", "provider"])
    head["work"] = head["work"].mask(head["work"] == head["work"].shift(), "")
    head["note"] = [first[place][1].note * layout.notes for place in places]
    parts = [head.set_axis([""] * 3, axis=1)]
    for dtype, each in found.items():
        cells = DataFrame(_cells(*each[x], layout) if x in each else {} for x in places).fillna("")
        cells = cells[sorted(cells, key="errors".__eq__)]  # they are last
        if layout.contest:
            counts = [competes(name) for _, name in places]
            cells = cells.apply(text.bold_least, counts=counts)
        prefix = f"{dtype}: " if len(found) > 1 else ""
        parts.append(cells.rename(columns={cells.columns[0]: prefix + cells.columns[0]}))
    return concat(parts, axis=1)


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
        WORKS[facts["work"]].title if facts.get("work") in WORKS else facts.get("work", ""),
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
    rows = DataFrame([{"dtype": x.facts["dtype"], **vars(row)} for x in groups for row in x.rows])
    parts = []
    for title, state in {"Not here": "absent", "Not able": "unable", "Wrong": "wrong"}.items():
        listed = []
        for why, who in rows[rows["state"] == state].groupby("reason", sort=False):
            dtypes = who.groupby("provider", sort=False)["dtype"].agg(set)
            names = (n if x == everywhere else f"{n} in {min(x)}" for n, x in dtypes.items())
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


def _heads(groups: Iterable[Group]) -> DataFrame:
    """Return a line for each case of the heads and each provider that a table has."""

    def extra_ratio(group: Group, row: Row) -> float | None:
        ours = group["ours"].extra_bytes if group["ours"] else None
        return row.extra_bytes / ours if row.extra_bytes is not None and (ours or 0) > 0 else None

    return DataFrame([
        {
            **{name: group.facts[name] for name in ("work", "model", "tokens", "dtype")},
            "case": number,
            "provider": row.provider,
            "runs": row.runs,
            "seconds": row.median,
            "x bare": group.ratio(row, BARE),
            "x ours": group.ratio(row, "ours"),
            "x ours-input": group.ratio(row, "ours-input"),
            "extra": row.extra_bytes,
            "extra memory x ours": extra_ratio(group, row),
            "value error": row.worst("loss", "logprobs", "entropy"),
            "gradient error": row.worst("dhidden", "dweight"),
            "same bits: again": row.info.get("repeatable"),
            "in another batch": row.info.get("batch_invariant"),
        }
        for number, group in enumerate(in_order(x for x in groups if x.benchmark == "heads"))
        for row in group.rows
        if row.shown
    ])  # fmt: skip


def cases(groups: Sequence[Group]) -> str:
    """Show a line per case of the heads: ours and the best baseline, in time and in memory."""
    rows = _heads(groups)
    if rows.empty:
        return ""
    header = [
        "work", "model", "T", "dtype", "bare",
        "x bare: ours", "ours-input", "fastest baseline",
        "extra MiB: ours", "ours-input", "leanest baseline",
    ]  # fmt: skip
    lines = [_case(case) for _, case in rows.groupby("case", sort=False)]
    return text.markdown(DataFrame(lines, columns=header))


def _case(rows: DataFrame) -> list[str]:
    rows = rows.set_index("provider")
    one, measured = rows.iloc[0], rows[rows["runs"]]
    cells = [str(one[name]) for name in ("work", "model", "tokens", "dtype")]
    cells.append(text.duration(measured["seconds"].get(BARE)))
    baselines = [name for name in measured.index if competes(name) and not is_ours(name)]
    for column, write in (("x bare", text.ratio), ("extra", text.mib)):
        known = measured[column].dropna()
        others = known[known.index.isin(baselines)]
        best = others.idxmin() if len(others) else ""
        *ours, other = text.bold_least([
            write(known.get(name)) for name in (*QUOTED, best)
        ])  # fmt: skip
        wrong = [name in rows.index and not rows["runs"][name] for name in QUOTED]
        cells += ["FAILED" if bad else cell for bad, cell in zip(wrong, ours, strict=True)]
        cells.append(f"{other} {best}".strip())
    return cells


def standings(groups: Sequence[Group]) -> str:
    """Show a line for each provider, over all of its cases of a dtype."""
    rows, parts = _heads(groups), []
    for dtype in DTYPES if len(rows) else ():
        if len(of_dtype := rows[rows["dtype"] == dtype]):
            parts += [f"{dtype}, {of_dtype['case'].nunique()} cases:"]
            parts += [text.markdown(_standings(of_dtype))]
    return "\n\n".join(parts)


def _standings(rows: DataFrame) -> DataFrame:
    by_provider = rows.groupby("provider", sort=False)
    ratios = by_provider["x bare"].median().fillna(math.inf)
    found = by_provider.agg(
        cases=("seconds", lambda x: str(x.count())),
        **{name: (name, _write_spread) for name in ("x bare", "x ours", "x ours-input")},
        **{"extra memory x ours": ("extra memory x ours", _write_spread)},
        **{name: (name, _write_worst) for name in ("value error", "gradient error")},
        **{name: (name, _write_always) for name in ("same bits: again", "in another batch")},
        failed=("runs", lambda x: str((~x).sum() or "")),
    )
    order = sorted(found.index, key=lambda name: (_place(name), ratios[name]))
    return found.loc[order].rename_axis("").reset_index()


def _write_spread(values: Series) -> str:
    return text.spread([*values.dropna()])


def _write_worst(errors: Series) -> str:
    return text.error(max(errors.dropna(), default=None))


def _write_always(values: Series) -> str:
    """Write whether it holds in all cases that know."""
    known = [*values.dropna()]
    failed = known.count(False)
    if 0 < failed < len(known):
        return f"all but {failed}"
    return "no" if failed else "yes" * any(known)


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
    order = list(dict.fromkeys(x["with"] for x in found["executed"]))
    rows = []
    for x in sorted(found["executed"], key=lambda x: (order.index(x["with"]), x["dtype"])):
        for work in x["work"]:
            count = work["instructions"]
            key = (x["provider"], x["with"], x["dtype"], work["kernel"])
            of_sass = {target: sass.get((*key, target)) for target in TARGETS}
            more = f", {x['with']}" if x["with"] else ""
            rows.append({
                "kernel": f"{x['provider']}{more}: `{work['kernel']}`",
                "logits": x["dtype"],
                **{kind: f"{count[kind]:z.2f}" for kind in kinds},
                "loads and stores": f"{count['load'] + count['store']:.2f}",
                "bytes read": f"{work['read']:z.1f}",
                "written": f"{work['written']:z.1f}",
                **{name: f"{y['instructions']:.1f}" if y else "" for name, y in of_sass.items()},
                "registers": str(of_sass["sm_90"]["registers"]) if of_sass["sm_90"] else "",
            })  # fmt: skip
    where = found["environment"]
    versions = ", ".join(f"{n} {where['versions'][n]}" for n in ("triton", "trl", "liger-kernel"))
    return f"{text.markdown(rows)}\n\n{where['date'][:10]}, {where['commit'][:12]}, {versions}."
