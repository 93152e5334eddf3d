"""Measurements as tables: one way to write any group, and two views over all cases of the heads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import text
from benchmarks.providers.base import is_ours
from benchmarks.results import Group, Row
from benchmarks.shapes import DTYPES, MODELS, SPREADS
from benchmarks.text import Lines
from benchmarks.work import WORKS

BARE = "bare-gemms"
QUOTED = ("ours", "ours-input")  # ours with exact logits, and with logits rounded as baselines do
_VALUES, _GRADIENTS = ("loss", "logprobs", "entropy"), ("dhidden", "dweight", "gradient")


@dataclass(frozen=True)
class Column:
    """One number of a row, or another thing that is written."""

    title: str
    value: Callable[[Group, Row], Any]  # None: an empty cell
    write: Callable[[Any], str] = str
    ranked: bool = True  # the least is bold


@dataclass(frozen=True)
class Layout:
    """How the groups of one benchmark are shown."""

    title: str
    columns: tuple[Column, ...]
    legend: str = ""
    beside: bool = False  # the dtypes of a case stand beside one another
    notes: bool = False  # a column says what each row is
    sort: bool = False  # by time; else in the order of the file
    label: Callable[[Group], str] | None = None  # all groups in one table, each under its label
    base: str = ""  # whose time is written in seconds, and all others' as a ratio to it
    hidden: tuple[str, ...] = ()  # rows that serve the others


def is_quoted(provider: str) -> bool:
    """Return whether tables of one case have it: of ours the defaults only."""
    return provider in QUOTED or not is_ours(provider)


def show(
    benchmark: str, groups: Sequence[Group], write: Callable[[Lines], str] = text.markdown
) -> str:
    """Show the groups of one benchmark; below each table who is not in it, and why."""
    layout = LAYOUTS[benchmark]
    found = [group for group in groups if group.benchmark == benchmark]
    tables: dict[str, list[Group]] = {}
    for group in in_order(found):
        facts = {**group.facts, "dtype": ""} if layout.beside else group.facts
        tables.setdefault("" if layout.label else json.dumps(facts), []).append(group)
    parts = [layout.legend] if found else []
    for of_table in tables.values():
        blocks = [of_table] if layout.label else [[group] for group in of_table]
        parts += [caption(of_table), write(_lines(blocks, layout)), missing(of_table)]
    return "\n\n".join(filter(None, parts))


def headline(groups: Sequence[Group]) -> str:
    """Show the defaults of ours beside everybody else, in the dtypes of one case."""
    quoted = [
        replace(group, rows=[row for row in group.rows if is_quoted(row.provider)])
        for group in in_order(groups)
    ]
    lines = _lines([[group] for group in quoted], LAYOUTS["heads"])
    return f"{caption(quoted)}\n\n{text.markdown(lines)}"


def _lines(blocks: Sequence[Sequence[Group]], layout: Layout) -> Lines:
    found = [
        {
            _place(group, row, layout): (group, row)
            for group in block
            for row in group.rows
            if row.shown and row.provider not in layout.hidden
        }
        for block in blocks
    ]
    places = list(dict.fromkeys(place for each in found for place in each))
    if layout.sort:
        places.sort(key=lambda place: _rank(place[2], [x[place] for x in found if place in x]))
    rows = [next(each[place] for each in found if place in each) for place in places]
    labels = [place[0] for place in places]
    first = [
        [x if x not in labels[:i] else "" for i, x in enumerate(labels)],
        [work for _, work, _ in places],
        [_name(row) for _, row in rows],
        [row.note if layout.notes else "" for _, row in rows],
    ]
    columns = [["", *cells] for cells in first if any(cells)]
    for block, each in zip(blocks, found, strict=True):
        for index, column in enumerate(layout.columns):
            prefix = f"{block[0].facts['dtype']}: " if len(blocks) > 1 and index == 0 else ""
            cells = [each.get(place) for place in places]
            columns.append([prefix + column.title, *_cells(column, cells, index == 0)])
    return [list(line) for line in zip(*columns, strict=True)]


def _place(group: Group, row: Row, layout: Layout) -> tuple[str, str, str]:
    label = layout.label(group) if layout.label else ""
    return label, row.info.get("work", ""), row.provider


def _rank(provider: str, found: Sequence[tuple[Group, Row]]) -> tuple[int, float]:
    first = (BARE, *QUOTED)
    group, row = found[0]
    size = row.median if row.median is not None else _noise(group, row)
    wrong = math.inf if not row.runs or size is None else size
    return first.index(provider) if provider in first else len(first), wrong


def _name(row: Row) -> str:
    bold = row.provider in QUOTED or (is_ours(row.provider) and row.provider.count(",") > 0)
    return text.bold(row.provider) if bold else row.provider


def _cells(column: Column, found: Sequence[tuple[Group, Row] | None], first: bool) -> list[str]:
    values = [None if x is None or not x[1].runs else column.value(*x) for x in found]
    texts = ["" if value is None else column.write(value) for value in values]
    if column.ranked:
        ranked = [
            None if x is None or x[1].provider == BARE else _size(value)
            for x, value in zip(found, values, strict=True)
        ]
        texts = text.bold_least(ranked, texts)
    if first:
        texts = ["FAILED" if x and not x[1].runs else t for x, t in zip(found, texts, strict=True)]
    return texts


def _size(value: Any) -> Any:
    """Return what values are compared by: of several the first."""
    return (value or [None])[0] if isinstance(value, list | tuple) else value


def caption(groups: Sequence[Group]) -> str:
    """Write what was measured, where, when and of which commit."""
    one = groups[0]
    facts = one.facts
    shape = f"D = {facts['hidden']}, V = {facts['vocabulary']}" if "hidden" in facts else ""
    if facts.get("softcap") is not None:
        shape += f", softcap {facts['softcap']:g}"
    dtypes = list(dict.fromkeys(group.facts["dtype"] for group in groups))
    said = [
        WORKS[facts["work"]].title if facts.get("work") in WORKS else facts.get("kernel", ""),
        facts["model"] + (f" ({shape})" if shape else ""),
        f"T = {facts['tokens']}",
        dtypes[0] if len(dtypes) == 1 else "",
        facts["inputs"] + " inputs" if "inputs" in facts else "",
        f"{facts['ranks']} ranks over gloo on one machine, a thread each"
        if "ranks" in facts
        else "",
        one.about,
        one.where,
        one.source,
    ]
    return f"{'; '.join(filter(None, said))}."


def missing(groups: Sequence[Group]) -> str:
    """Say who is not in a table, by reason; and who is wrong."""
    parts = []
    for title, state in {"Not here": "absent", "Not able": "unable", "Wrong": "wrong"}.items():
        reasons: dict[str, list[str]] = {}
        for group in groups:
            where = f" in {group.facts['dtype']}" if len(groups) > 1 else ""
            for row in group.rows:
                if row.state == state:
                    reasons.setdefault(row.reason, []).append(f"{row.provider}{where}")
        everywhere = {why: _in_all(who, groups) for why, who in reasons.items()}
        listed = "; ".join(f"{', '.join(who)} ({why})" for why, who in everywhere.items())
        parts += [f"{title}: {listed}."] if listed else []
    return " ".join(parts)


def _in_all(who: list[str], groups: Sequence[Group]) -> list[str]:
    """Leave out the dtype of those that have the same reason in all of them."""
    plain = [name.partition(" in ")[0] for name in who]
    short = (n if plain.count(p) < len(groups) else p for n, p in zip(who, plain, strict=True))
    return list(dict.fromkeys(short))


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort by work, then as models, inputs and dtypes are listed; others as they came."""
    known = {"work": list(WORKS), "model": list(MODELS), "dtype": list(DTYPES)}

    def place(group: Group) -> tuple[Any, ...]:
        facts = group.facts
        listed = {n: x.index(facts[n]) if facts.get(n) in x else len(x) for n, x in known.items()}
        # the flat tail last
        inputs = (list(SPREADS).index(facts.get("inputs", "peaked")) - 1) % len(SPREADS)
        listed |= {"tokens": facts["tokens"], "inputs": inputs}
        return tuple(listed[name] for name in ("work", "model", "tokens", "inputs", "dtype"))

    return sorted(groups, key=place)


def _time(group: Group, row: Row) -> str | None:
    """Write seconds of the base, and of the others the ratio to it."""
    base = row.info.get("base") or LAYOUTS[group.benchmark].base
    ratio = group.ratio(row, base)
    if ratio is None or row.provider == base:
        return None if row.median is None else text.duration(row.median)
    return f"x {text.ratio(ratio)}" + (f" of {base}" if "base" in row.info else "")


def _largest(row: Row, outputs: Sequence[str]) -> float | None:
    return max((row.errors[name] for name in outputs if name in row.errors), default=None)


def _noise(group: Group, row: Row) -> float | None:
    return row.errors.get("dhidden", row.info.get("ratio noise", [None])[0])


def _errors(group: Group, row: Row) -> str:
    return ", ".join(f"{name} {text.error(value)}" for name, value in row.errors.items())


def _pair(first: str, second: str = "") -> Callable[[Sequence[float]], str]:
    return lambda x: f"{first.format(x[0])} ({(second or first).format(x[1])})" if x else ""


def _errors_pair(x: Sequence[float]) -> str:
    return f"{text.error(x[0])} ({text.error(x[1])})"


def _info(title: str, name: str, write: Callable[[Any], str], ranked: bool = True) -> Column:
    return Column(title, lambda group, row: row.info.get(name), write, ranked)


def _error(name: str) -> Column:
    return Column(name, lambda group, row: row.errors.get(name), text.error)


def _phase(title: str, name: str) -> Column:
    return _info(title, name, text.duration, ranked=False)


def _step(group: Group) -> str:
    """Name a host's step."""
    versions = {x.info["version"]: None for x in group.rows if "version" in x.info}
    return f"{' '.join([group.facts['host'], *versions])}: {group.facts['step']}"


def _head_share(group: Group, row: Row) -> str | None:
    """Write the time of the head: that of the step, less what it takes without one."""
    rest, theirs = group["no head"], group["theirs"]
    if not (rest and theirs and rest.median and theirs.median and row.median):
        return None
    head, other = row.median - rest.median, theirs.median - rest.median
    return text.duration(head) if row is theirs else f"x {text.ratio(head / other)}"


def _beside_bare(group: Group, row: Row) -> tuple[float, float | None] | None:
    """Return the ratio to the bare GEMMs, and of those themselves the seconds."""
    ratio = group.ratio(row, BARE)
    return None if ratio is None else (ratio, row.median if row.provider == BARE else None)


_BESIDE_BARE = Column(
    "x bare",
    _beside_bare,
    lambda x: text.ratio(x[0]) + (f" ({text.duration(x[1])})" if x[1] else ""),
)
_TIME, _ERRORS = Column("time", _time, ranked=False), Column("errors", _errors, ranked=False)
_EXTRA = _info("extra MiB", "extra_bytes", text.mib)
_GROWN = _info("MiB grown", "grown_bytes", text.mib, ranked=False)
_BANDS = ("p > 0.98", "p 0.5 to 0.98", "p < 0.5")
LAYOUTS = {
    "heads": Layout(
        "Every case",
        (
            _BESIDE_BARE,
            Column("x ours", lambda group, row: group.ratio(row, "ours"), text.ratio),
            _info("MiB", "extra_bytes", text.mib),
            Column("value", lambda group, row: _largest(row, _VALUES), text.error),
            Column("grad", lambda group, row: _largest(row, _GRADIENTS), text.error),
        ),
        "x bare: time over that of the bare GEMMs, which everybody needs. MiB: peak memory beyond "
        "inputs and outputs. value, grad: errors, of a loss absolute, else the norm of the "
        "difference over the norm.",
        beside=True,
        sort=True,
    ),
    "training": Layout(
        "Training step",
        (
            Column("step", lambda group, row: row.median, text.duration),
            Column("x ours", lambda group, row: group.ratio(row, "ours"), text.ratio),
            _phase("generate", "generate_seconds"),
            _phase("train", "train_seconds"),
            _info("train: peak MiB", "train_bytes", text.mib),
            _ERRORS,
            _info("gradient norm: first step, last", "grad_norm", _pair("{:.3g}"), False),
        ),
        sort=True,
    ),
    "savings": Layout("What is saved", (_TIME, _ERRORS), notes=True),
    "products": Layout(
        "Products",
        (
            _TIME,
            _info("TFLOP/s", "tflop_per_second", text.digits, ranked=False),
            _info("GB/s", "gb_per_second", text.digits, ranked=False),
        ),
        notes=True,
        base="logits bf16",
    ),
    "tiles": Layout(
        "Tiles of the GPU kernels",
        (Column("time", lambda group, row: row.median, text.duration),),
        notes=True,
        sort=True,
    ),
    "backwards": Layout(
        "Backwards",
        (
            Column("x P", _time, ranked=False),
            _info("extra MiB", "extra_bytes", text.mib, ranked=False),
            _error("dhidden"),
            _error("dweight"),
            _info("entries: mean (max)", "entries", _pair("{:.1f}", "{:.0f}"), False),
            _info("exact, %", "exact_share", text.percent, ranked=False),
        ),
        "x P: time of forward and backward over that of the bare GEMM of the logits, in the same "
        "run. dhidden and dweight: norm of the difference over the norm. entries: how many of a "
        "row the forward keeps, of rows that are not exact; exact: those that are.",
        beside=True,
        base=BARE,
    ),
    "sharded": Layout(
        "Over several ranks",
        (
            _TIME,
            _info("MiB a rank grows", "grown_bytes", text.mib, ranked=False),
            _info("bytes sent (of T (32 + 4 D))", "sent", _pair("{:d}", "{:g}"), ranked=False),
            _ERRORS,
        ),
        notes=True,
        base="one process",
    ),
    "hosts": Layout(
        "In other trainers",
        (
            Column("step", _time, ranked=False),
            Column("the head in it", _head_share, ranked=False),
            _GROWN,
            Column("difference from theirs", _errors, ranked=False),
        ),
        "Forward and backward of a step, or of a head. T: the tokens of a step; a pair has two "
        "completions. The head in it: its time less that of the same step without a head.",
        label=_step,
        base="theirs",
        hidden=("no head",),
    ),
    "rollouts": Layout(
        "Generation and the rest of a step",
        (
            Column("step", lambda group, row: row.median, text.duration, ranked=False),
            _info("generated, tokens/s", "tokens_per_second", text.digits, ranked=False),
            _info("update, s", "update_seconds", text.digits, ranked=False),
            _info("update, GiB/s", "update_gib_per_second", text.digits, ranked=False),
            *(
                _info(f"{title}, %", f"{name}_share", text.percent, ranked=False)
                for name, title in {
                    "generate": "generate",
                    "sync": "update",
                    "score": "rewards",
                    "old": "old policy",
                    "ref": "reference",
                    "loss": "loss",
                }.items()
            ),
        ),
        "Medians over the steps of one run of the trainer, by the clock that it logs. generated: "
        "completion tokens over the seconds of generation. update: from the trainer's weights to "
        "an engine that can generate with them; transformers' engines have the policy's own. The "
        "rest are shares of a step; of the generation that overlaps with training only the wait "
        "counts.",
        notes=True,
    ),
    "accuracy": Layout(
        "Errors on a policy's distributions",
        (
            *(_info(f"logp, {b}", f"logp, {b}", _errors_pair) for b in _BANDS),
            _info("ratio noise", "ratio noise", _errors_pair),
            _info("H", "H", _errors_pair),
            *map(_error, ("loss", "dhidden", "dweight")),
            *(
                _info(f"rows of dhidden, {b}", f"rows of dhidden, {b}", _errors_pair)
                for b in _BANDS
            ),
        ),
        "Against fp64 of the same inputs, on tokens drawn from the distributions themselves: the "
        "median and in brackets the largest, of the ratio noise the mean. logp: absolute errors of "
        "the log-probabilities, by the probability p of the token. Ratio noise: |exp(logp - exact) "
        "- 1|, by how much an importance ratio is off whose other side is exact; on-policy it is "
        "to be 1. H: absolute errors of the entropy. Of a loss, whose batch is off-policy, so that "
        "some tokens are clipped: the absolute error; dhidden and dweight: norm of the difference "
        "over the norm, and the same of the rows of dhidden that have a gradient: one at p near 1 "
        "is a small difference of large terms, which rounded logits get wrong. Gradients are "
        "returned in the dtype of the inputs, and nobody is more exact than that.",
        sort=True,
    ),
}


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
    facts, bare = group.facts, group[BARE]
    cells = [facts["work"], facts["model"], str(facts["tokens"]), facts["dtype"]]
    cells.append(text.duration(bare.median if bare else None))
    for column in (_BESIDE_BARE, _EXTRA):
        sizes = {x.provider: column.value(group, x) for x in group.rows if x.runs}
        others = {n: x for n, x in sizes.items() if x is not None and n != BARE and not is_ours(n)}
        best = min(others, key=lambda name: _size(others[name]), default="")
        values = [*(sizes.get(name) for name in QUOTED), others.get(best)]
        texts = ["" if x is None else column.write(x) for x in values]
        *ours, other = text.bold_least([_size(x) for x in values], texts)
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
    first = (BARE, *QUOTED)
    names = dict.fromkeys(row.provider for group in groups for row in group.rows if row.shown)

    def ratios(name: str, base: str) -> list[float]:
        found = (group.ratio(group[name], base) for group in groups)
        return [x for x in found if x is not None]

    def place(name: str) -> tuple[int, float]:
        rank = first.index(name) if name in first else len(first)
        return rank, statistics.median(ratios(name, BARE) or [math.inf])

    header = [
        "", "cases", "x bare", "x ours", "x ours-input", "extra memory x ours",
        "value error", "gradient error", "same bits: again", "in another batch", "failed",
    ]  # fmt: skip
    lines = [header]
    for name in sorted(names, key=place):
        rows = [(group, row) for group in groups if (row := group[name])]
        right = [row for _, row in rows if row.runs]
        sizes = [(row.info.get("extra_bytes"), _extra(group["ours"])) for group, row in rows]
        lines.append([
            text.bold(name) if name in QUOTED else name,
            str(sum(row.median is not None for row in right)),
            *(_middle(ratios(name, base)) for base in first),
            _middle([size / ours for size, ours in sizes if size is not None and ours]),
            text.error(max((x for r in right if (x := _largest(r, _VALUES))), default=None)),
            text.error(max((x for r in right if (x := _largest(r, _GRADIENTS))), default=None)),
            _always([row.info.get("repeatable") for row in right]),
            _always([row.info.get("batch_invariant") for row in right]),
            str(len(rows) - len(right) or ""),
        ])  # fmt: skip
    return lines


def _extra(row: Row | None) -> int | None:
    """Return extra bytes that something can be divided by."""
    size = row.info.get("extra_bytes") if row and row.runs else None
    return size if size and size > 0 else None


def _middle(values: list[float]) -> str:
    return text.spread(values, statistics.median(values)) if values else ""


def _always(values: Sequence[bool | None]) -> str:
    """Write whether it holds in all cases that know."""
    known = [value for value in values if value is not None]
    if False in known and True in known:
        return f"all but {known.count(False)}"
    return ("yes" if all(known) else "no") if known else ""
