"""one_pass against two_pass in the cases that have both, and which of them "auto" takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import text
from benchmarks.derive import Figures, case, figures
from benchmarks.load import Table
from benchmarks.overview import in_order
from benchmarks.providers.ours import auto_schedule, splits_sequences

_TWO_PASS = "ours-two-pass"


@dataclass(frozen=True, kw_only=True)
class Match:
    """Both schedules in one case."""

    table: Table
    one_pass: Figures
    two_pass: Figures
    choice: str  # of "auto"

    @property
    def loss(self) -> float:
        """Time of the choice over that of the faster."""
        medians = {
            name: x.times.median
            for name, x in (("one_pass", self.one_pass), ("two_pass", self.two_pass))
            if x.times
        }
        return medians[self.choice] / min(medians.values())


def matches(tables: Sequence[Table]) -> list[Match]:
    """Of every case in which both were timed."""
    found = []
    for table in in_order(tables):
        rows = figures(table)
        one, two = _one_pass(table, rows), rows.get(_TWO_PASS)
        if one and two and one.times and two.times:
            choice = _choice(table, rows)
            found.append(Match(table=table, one_pass=one, two_pass=two, choice=choice))
    return found


def _one_pass(table: Table, rows: dict[str, Figures]) -> Figures | None:
    """Ours, unless that was two_pass. Files that do not say are older than the choice."""
    if forced := rows.get("ours-one-pass"):
        return forced
    ours = rows.get("ours")
    if ours is None or ours.row.schedule == "two_pass":
        return None
    old = ours.row.schedule is None
    split = old and splits_sequences(case(table), table.environment.kind)
    return None if split else ours


def _choice(table: Table, rows: dict[str, Figures]) -> str:
    """What ran; of older files what "auto" takes now."""
    stored = rows["ours"].row.schedule if "ours" in rows else None
    return stored or auto_schedule(case(table), table.environment.kind)


def schedules_table(tables: Sequence[Table]) -> str:
    """A line for each case, and how good the choices were."""
    every = matches(tables)
    header = [
        "work", "model", "T", "dtype", "one_pass", "two_pass",
        "extra MiB: one_pass", "two_pass", "auto", "x the faster",
    ]  # fmt: skip
    table = text.markdown_table(*text.without_empty(header, map(_line, every)))
    return f"{table}\n\n{_verdict(every)}"


def _line(match: Match) -> list[str]:
    table, both = match.table, (match.one_pass, match.two_pass)
    medians = [x.times.median if x.times else None for x in both]
    extras = [x.extra for x in both]
    return [
        table.work,
        table.model,
        str(table.tokens),
        table.dtype,
        *text.bold_least(medians, [text.duration(x) if x else "" for x in medians]),
        *text.bold_least(extras, [text.mib(x) for x in extras]),
        match.choice,
        text.ratio(match.loss),
    ]


def _verdict(every: Sequence[Match]) -> str:
    losses = [match.loss for match in every]
    right = sum(loss == 1 for loss in losses)
    worst = 100 * (max(losses) - 1)
    return (
        f"It takes the faster schedule in {right} of {len(losses)} cases, and loses "
        f"{worst:.1f} % against it at most."
    )
