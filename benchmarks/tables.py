"""Measurements as tables: one way to write any group, and two views over all cases of the heads."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_FIRST = (BARE, *QUOTED)
_BANDS = ("p > 0.98", "p 0.5 to 0.98", "p < 0.5")


@dataclass(frozen=True)
class Layout:
    """How the groups of one benchmark are shown."""

    title: str
    columns: Mapping[str, str]  # of a title: what stands below it; "*": the least is bold
    legend: str = ""
    beside: bool = False  # the dtypes of a case stand beside one another
    notes: bool = False  # a column says what each row is
    sort: bool = False  # by time; else in the order of the file
    together: bool = False  # all groups in one table
    base: str = ""  # whose time is written in seconds, and all others' as a ratio to it


def is_quoted(provider: str) -> bool:
    """Return whether tables of one case have it: of ours the defaults only."""
    return provider in QUOTED or not is_ours(provider)


def show(
    benchmark: str, groups: Sequence[Group], write: Callable[[Lines], str] = text.markdown
) -> str:
    """Show the groups of one benchmark; below each table who is not in it, and why."""
    layout = LAYOUTS[benchmark]
    tables: dict[str, list[Group]] = {}
    for group in in_order(group for group in groups if group.benchmark == benchmark):
        facts = {**group.facts, "dtype": ""} if layout.beside else group.facts
        tables.setdefault("" if layout.together else json.dumps(facts), []).append(group)
    parts = [layout.legend] if tables else []
    for found in tables.values():
        blocks = [found] if layout.together else [[group] for group in found]
        parts += [caption(found), write(_lines(blocks, layout)), missing(found)]
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
    """Write a line for each work and provider; each block has its columns."""
    found = [
        {
            (row.info.get("work", ""), row.provider): (group, row)
            for group in block
            for row in group.rows
            if row.shown
        }
        for block in blocks
    ]
    first = {place: pair for each in reversed(found) for place, pair in each.items()}
    places = list(dict.fromkeys(place for each in found for place in each))
    if layout.sort:
        places.sort(key=lambda place: _rank(*first[place]))
    works = [work for work, _ in places]
    columns = [
        ["", *("" if i and works[i - 1] == work else work for i, work in enumerate(works))],
        ["", *(_name(provider) for _, provider in places)],
        ["", *(first[place][1].note if layout.notes else "" for place in places)],
    ]
    columns = [column for column in columns if any(column)]
    for block, each in zip(blocks, found, strict=True):
        prefix = f"{block[0].facts['dtype']}: " if len(blocks) > 1 else ""
        pairs = [each.get(place) for place in places]
        failed = [pair is not None and not pair[1].runs for pair in pairs]
        for title, name in layout.columns.items():
            cells = _cells(name, pairs)
            if title == next(iter(layout.columns)):
                title = prefix + title
                cells = ["FAILED" if bad else x for bad, x in zip(failed, cells, strict=True)]
            columns.append([title, *cells])
    return [list(line) for line in zip(*columns, strict=True)]


def _rank(group: Group, row: Row) -> tuple[int, float]:
    """Return where a row stands: by time, else by how exact it is."""
    size = row.median
    if size is None:
        size = row.errors.get("dhidden", row.info.get("ratio noise", [None])[0])
    return _place(row.provider), math.inf if size is None or not row.runs else size


def _place(provider: str) -> int:
    return _FIRST.index(provider) if provider in _FIRST else len(_FIRST)


def _name(provider: str) -> str:
    bold = provider in QUOTED or (is_ours(provider) and "," in provider)
    return text.bold(provider) if bold else provider


def _cells(name: str, pairs: Sequence[tuple[Group, Row] | None]) -> list[str]:
    """Write one number of every row."""
    plain = name.removeprefix("*")
    values = [None if x is None or not x[1].runs else _value(plain, *x) for x in pairs]
    cells = ["" if value is None else _write(plain, value) for value in values]
    if plain == name:
        return cells
    ranked = [
        None if x is None or x[1].provider == BARE else _size(value)
        for x, value in zip(pairs, values, strict=True)
    ]
    return text.bold_least(ranked, cells)


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
    dtypes = {group.facts["dtype"] for group in groups}
    ranks = f"{facts.get('ranks')} ranks over gloo on one machine, a thread each"
    said = [
        WORKS[facts["work"]].title if facts.get("work") in WORKS else facts.get("kernel", ""),
        facts["model"] + (f" ({shape})" if shape else ""),
        f"T = {facts['tokens']}",
        facts["dtype"] if len(dtypes) == 1 else "",
        facts["inputs"] + " inputs" if "inputs" in facts else "",
        ranks if "ranks" in facts else "",
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
        listed = [
            f"{', '.join(n if x == everywhere else f'{n} in {min(x)}' for n, x in who.items())} "
            f"({why})"
            for why, who in reasons.items()
        ]
        parts += [f"{title}: {'; '.join(listed)}."] if listed else []
    return " ".join(parts)


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Sort by work, then as models, inputs and dtypes are listed; others as they came."""

    def place(group: Group) -> tuple[int, ...]:
        facts = group.facts

        def index(name: str, known: Iterable[str]) -> int:
            listed = list(known)
            return listed.index(facts[name]) if facts.get(name) in listed else len(listed)

        # the flat tail last
        inputs = (list(SPREADS).index(facts.get("inputs", "peaked")) - 1) % len(SPREADS)
        model = index("model", MODELS), facts["tokens"]
        return index("work", WORKS), *model, inputs, index("dtype", DTYPES)

    return sorted(groups, key=place)


def _value(name: str, group: Group, row: Row) -> Any:
    """Return a number of a row, or another thing that is written; None: an empty cell."""
    if name in _COMPUTED:
        return _COMPUTED[name](group, row)
    return row.info.get(name, row.errors.get(name))


def _write(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    one = text.error if isinstance(value, float) else _errors_pair
    return next((write for end, write in _WRITERS.items() if name.endswith(end)), one)(value)


def _time(group: Group, row: Row) -> str | None:
    """Write seconds of the base, and of the others the ratio to it."""
    base = row.info.get("base") or LAYOUTS[group.benchmark].base
    ratio = group.ratio(row, base)
    if ratio is None or row.provider == base:
        return None if row.median is None else text.duration(row.median)
    return f"x {text.ratio(ratio)}" + (f" of {base}" if "base" in row.info else "")


def _head_share(group: Group, row: Row) -> str | None:
    """Write the time of the head: that of the step, less what it takes without one."""
    rest, theirs = group["no head"], group["theirs"]
    if row is rest or not (rest and theirs and rest.median and theirs.median and row.median):
        return None
    head, other = row.median - rest.median, theirs.median - rest.median
    return text.duration(head) if row is theirs else f"x {text.ratio(head / other)}"


def _beside_bare(group: Group, row: Row) -> tuple[float, float | None] | None:
    """Return the ratio to the bare GEMMs, and of those themselves the seconds."""
    ratio = group.ratio(row, BARE)
    return None if ratio is None else (ratio, row.median if row.provider == BARE else None)


def _largest(*outputs: str) -> Callable[[Group, Row], float | None]:
    return lambda group, row: max(
        (row.errors[x] for x in outputs if row.runs and x in row.errors), default=None
    )


def _errors_pair(x: Sequence[float]) -> str:
    return f"{text.error(x[0])} ({text.error(x[1])})"


# what is not found under its name in a row's info or errors
_COMPUTED: dict[str, Callable[[Group, Row], Any]] = {
    "seconds": lambda group, row: row.median,
    "x ours": lambda group, row: group.ratio(row, "ours"),
    "x bare": _beside_bare,
    "time": _time,
    "head": _head_share,
    "values": _largest("loss", "logprobs", "entropy"),
    "gradients": _largest("dhidden", "dweight", "gradient"),
    "errors": lambda group, row: ", ".join(f"{n} {text.error(x)}" for n, x in row.errors.items()),
}
# how numbers are written, by the end of their names; others are errors
_WRITERS: dict[str, Callable[[Any], str]] = {
    "x ours": text.ratio,
    "x bare": lambda x: text.ratio(x[0]) + (f" ({text.duration(x[1])})" if x[1] else ""),
    "grad_norm": lambda x: f"{x[0]:.3g} ({x[1]:.3g})",
    "entries": lambda x: f"{x[0]:.1f} ({x[1]:.0f})" if x else "",
    "sent": lambda x: f"{x[0]:d} ({x[1]:g})",
    "_bytes": text.mib,
    "_share": text.percent,
    "seconds": text.duration,
    "_per_second": text.digits,
}
LAYOUTS = {
    "heads": Layout(
        "Every case",
        {
            "x bare": "*x bare",
            "x ours": "*x ours",
            "MiB": "*extra_bytes",
            "value": "*values",
            "grad": "*gradients",
        },
        "x bare: time over that of the bare GEMMs, which everybody needs. MiB: peak memory beyond "
        "inputs and outputs. value, grad: errors, of a loss absolute, else the norm of the "
        "difference over the norm.",
        beside=True,
        sort=True,
    ),
    "training": Layout(
        "Training step",
        {
            "step": "*seconds",
            "x ours": "*x ours",
            "generate": "generate_seconds",
            "train": "train_seconds",
            "train: peak MiB": "*train_bytes",
            "errors": "errors",
            "gradient norm: first step, last": "grad_norm",
        },
        sort=True,
    ),
    "savings": Layout("What is saved", {"time": "time", "errors": "errors"}, notes=True),
    "products": Layout(
        "Products",
        {"time": "time", "TFLOP/s": "tflop_per_second", "GB/s": "gb_per_second"},
        notes=True,
        base="logits bf16",
    ),
    "tiles": Layout("Tiles of the GPU kernels", {"time": "*seconds"}, notes=True, sort=True),
    "backwards": Layout(
        "Backwards",
        {
            "x P": "time",
            "extra MiB": "extra_bytes",
            "dhidden": "*dhidden",
            "dweight": "*dweight",
            "entries: mean (max)": "entries",
            "exact, %": "exact_share",
        },
        beside=True,
        base=BARE,
    ),
    "sharded": Layout(
        "Over several ranks",
        {
            "time": "time",
            "MiB a rank grows": "grown_bytes",
            "bytes sent (of T (32 + 4 D))": "sent",
            "errors": "errors",
        },
        notes=True,
        base="one process",
    ),
    "hosts": Layout(
        "In other trainers",
        {
            "step": "time",
            "the head in it": "head",
            "MiB grown": "grown_bytes",
            "difference from theirs": "errors",
        },
        together=True,
        base="theirs",
    ),
    "rollouts": Layout(
        "Generation and the rest of a step",
        {
            "step": "seconds",
            "generated, tokens/s": "tokens_per_second",
            "update": "update_seconds",
            "update, GiB/s": "update_gib_per_second",
            "generate, %": "generate_share",
            "update, %": "sync_share",
            "rewards, %": "score_share",
            "old policy, %": "old_share",
            "reference, %": "ref_share",
            "loss, %": "loss_share",
        },
        notes=True,
    ),
    "accuracy": Layout(
        "Errors on a policy's distributions",
        {
            **{f"logp, {band}": f"*logp, {band}" for band in _BANDS},
            **{x: f"*{x}" for x in ("ratio noise", "H", "loss", "dhidden", "dweight")},
            **{f"rows of dhidden, {band}": f"*rows of dhidden, {band}" for band in _BANDS},
        },
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
    for name in ("x bare", "extra_bytes"):
        sizes = {x.provider: _value(name, group, x) for x in group.rows if x.runs}
        others = {n: x for n, x in sizes.items() if x is not None and n != BARE and not is_ours(n)}
        best = min(others, key=lambda name: _size(others[name]), default="")
        values = [*(sizes.get(provider) for provider in QUOTED), others.get(best)]
        texts = ["" if x is None else _write(name, x) for x in values]
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
    by_name: dict[str, list[tuple[Group, Row]]] = {}
    for group in groups:
        for row in group.rows:
            if row.shown:
                by_name.setdefault(row.provider, []).append((group, row))
    known = {
        name: {
            title: [x for pair in pairs if (x := value(*pair)) is not None]
            for title, (value, _) in _STANDINGS.items()
        }
        for name, pairs in by_name.items()
    }

    def place(name: str) -> tuple[int, float]:
        return _place(name), statistics.median(known[name]["x bare"] or [math.inf])

    lines = [["", *_STANDINGS]]
    for name in sorted(known, key=place):
        cells = [write(known[name][title]) for title, (_, write) in _STANDINGS.items()]
        lines.append([text.bold(name) if name in QUOTED else name, *cells])
    return lines


def _ratio(base: str) -> Callable[[Group, Row], float | None]:
    return lambda group, row: group.ratio(row, base)


def _extra_ratio(group: Group, row: Row) -> float | None:
    size, ours = (x and x.info.get("extra_bytes") for x in (row, group["ours"]))
    return None if size is None or not ours or ours < 0 else size / ours


def _worst(values: Sequence[float]) -> str:
    return text.error(max(values, default=None))


def _always(values: Sequence[bool]) -> str:
    """Write whether it holds in all cases that know."""
    failed = values.count(False)
    return (
        f"all but {failed}" if 0 < failed < len(values) else "no" if failed else "yes" * any(values)
    )


# what is found in each case of a provider, and how all of that is written
_STANDINGS: dict[str, tuple[Callable[[Group, Row], Any], Callable[[list], str]]] = {
    "cases": (lambda group, row: row.median, lambda x: str(len(x))),
    "x bare": (_ratio(BARE), text.spread),
    "x ours": (_ratio("ours"), text.spread),
    "x ours-input": (_ratio("ours-input"), text.spread),
    "extra memory x ours": (_extra_ratio, text.spread),
    "value error": (_COMPUTED["values"], _worst),
    "gradient error": (_COMPUTED["gradients"], _worst),
    "same bits: again": (lambda group, row: row.info.get("repeatable"), _always),
    "in another batch": (lambda group, row: row.info.get("batch_invariant"), _always),
    "failed": (lambda group, row: None if row.runs else True, lambda x: str(len(x) or "")),
}
