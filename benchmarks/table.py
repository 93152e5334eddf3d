"""Measurements as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks import text
from benchmarks.derive import FLOOR, QUOTED, Figures, Times, figures, here, mib, phase_times, times
from benchmarks.load import Table, TrainingRow, TrainingTable
from benchmarks.row import Line, Row

_SHORT = {"logprobs": "logp", "entropy": "H"}


@dataclass(frozen=True)
class Column:
    """Of a case's table; left out where no row has anything to say."""

    title: str
    meaning: str
    cell: Callable[[Figures, text.Unit], str]


def _to(base: str) -> Callable[[Figures, text.Unit], str]:
    return lambda x, unit: text.ratio(x.times.to.get(base)) if x.times else ""


def _median(x: Figures, unit: text.Unit) -> str:
    if x.row.failure:
        return f"FAILED: {x.row.failure}"
    return unit.of(x.times.median) if x.times else "not timed"


def _range(x: Figures, unit: text.Unit) -> str:
    return _min_to_max(x.times, unit) if x.times else ""


def _min_to_max(timed: Times, unit: text.Unit) -> str:
    return f"{unit.of(timed.minimum)} to {unit.of(timed.maximum)}"


def _extra(x: Figures, unit: text.Unit) -> str:
    plan = f" (plan {text.mib(x.predicted)})" if x.predicted is not None else ""
    return text.mib(x.extra) + plan


def _error_list(row: Row | TrainingRow) -> str:
    return ", ".join(f"{_SHORT.get(k, k)} {text.error(v)}" for k, v in row.errors.items())


COLUMNS = (
    Column("median", "median time of a call over the rounds", _median),
    Column("min to max", "the fastest and the slowest round", _range),
    Column(
        "x floor",
        "median over that of the floor: the matrix products that nobody can avoid, alone",
        _to(FLOOR),
    ),
    Column("x ours", "median over that of `ours`: above 1 is slower than `ours`", _to("ours")),
    Column(
        "x ours-input", "the same for `ours-input`, which rounds as most peers do", _to(QUOTED[1])
    ),
    Column(
        "TFLOP/s",
        "operations of the unavoidable products over the median: work repeated to save memory "
        "does not count",
        lambda x, unit: text.digits(x.tflops),
    ),
    Column(
        "extra MiB",
        "peak memory beyond the inputs and what is returned; in brackets what "
        "`grpo-kernels plan` predicts",
        _extra,
    ),
    Column(
        "returned MiB",
        "gradients or log-probabilities that the caller keeps",
        lambda x, unit: text.mib(x.returned),
    ),
    Column(
        "errors",
        "against the reference: of the loss absolute; of log-probabilities (logp), entropy (H) "
        "and gradients the norm of the difference over the norm",
        lambda x, unit: _error_list(x.row),
    ),
    Column(
        "same bits: again",
        "whether a second run gives the same bits",
        lambda x, unit: text.yes_no(x.row.repeatable),
    ),
    Column(
        "in another batch",
        "whether the rows of half the batch have the bits they have in the whole one",
        lambda x, unit: text.yes_no(x.row.batch_invariant),
    ),
)


def column_legend() -> str:
    return "\n".join(f"* {column.title}: {column.meaning}." for column in COLUMNS)


def case_table(table: Table) -> str:
    """One line per provider that is here and able, then who is not."""
    rows = figures(table)
    unit = text.unit_for(x.times.median for x in rows.values() if x.times)
    columns = {column.title: [column.cell(x, unit) for x in rows.values()] for column in COLUMNS}
    medians = [x.times.median if x.times and name != FLOOR else None for name, x in rows.items()]
    extras = [x.extra if name != FLOOR else None for name, x in rows.items()]
    columns["median"] = text.bold_least(medians, columns["median"])
    columns["extra MiB"] = text.bold_least(extras, columns["extra MiB"])
    header = ["", *(f"median, {unit.name}" if title == "median" else title for title in columns)]
    body = zip(map(_name, rows.values()), *columns.values(), strict=True)
    return with_missing(text.markdown_table(*text.without_empty(header, body)), table.rows)


def _name(x: Figures) -> str:
    name = f"{x.row.provider} (alone)" if x.row.alone else x.row.provider
    return text.bold(name) if x.row.provider in QUOTED else name


def with_missing(table: str, rows: Sequence[Line] | Sequence[TrainingRow]) -> str:
    """Under the table, who is not in it, by reason."""
    absent = _by_reason((row.provider, row.absent) for row in rows)
    unable = _by_reason((row.provider, row.unable) for row in rows if row.absent is None)
    parts = [f"Not here: {absent}." if absent else "", f"Not able: {unable}." if unable else ""]
    return "\n\n".join(filter(None, [table, " ".join(filter(None, parts))]))


def _by_reason(reasons: Iterable[tuple[str, str | None]]) -> str:
    names: dict[str, list[str]] = {}
    for provider, reason in reasons:
        if reason is not None:
            names.setdefault(reason, []).append(provider)
    return "; ".join(f"{', '.join(who)} ({why})" for why, who in names.items())


def training_table(table: TrainingTable) -> str:
    """One line per trainer."""
    rows = here(table.rows)
    timed = times(rows)
    unit = text.unit_for(x.median for x in timed.values())
    phases = list(dict.fromkeys(phase for row in rows for phase in row.phases))
    header = ["", f"step: median, {unit.name}", "min to max", "x ours"]
    columns = [_times_cells(row, timed.get(row.provider), unit) for row in rows]
    for phase in phases:
        header += [f"{phase}: median, {unit.name}", "x ours"]
        of_phase = phase_times(rows, phase)
        for cells, row in zip(columns, rows, strict=True):
            found = of_phase.get(row.provider)
            cells += [unit.of(found.median), _to_ours(found)] if found else ["", ""]
    header += ["train: peak MiB", "errors", "gradient norm: first step, last"]
    for cells, row in zip(columns, rows, strict=True):
        cells += [_peak(row), _error_list(row), _norms(row)]
    return with_missing(text.markdown_table(*text.without_empty(header, columns)), table.rows)


def _times_cells(row: TrainingRow, timed: Times | None, unit: text.Unit) -> list[str]:
    name = text.bold(row.provider) if row.provider in QUOTED else row.provider
    if timed is None:
        return [name, f"FAILED: {row.failure}" if row.failure else "not timed", "", ""]
    return [name, unit.of(timed.median), _min_to_max(timed, unit), _to_ours(timed)]


def _to_ours(timed: Times) -> str:
    return text.ratio(timed.to.get("ours"))


def _peak(row: TrainingRow) -> str:
    return text.mib(mib(row.memory["train"])) if row.memory and "train" in row.memory else ""


def _norms(row: TrainingRow) -> str:
    """The loss of an on-policy step is 0 but for rounding; its gradient is not."""
    return f"{row.grad_norm[0]:.3g}, {row.grad_norm[-1]:.3g}" if row.grad_norm else ""
