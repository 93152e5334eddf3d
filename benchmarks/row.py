"""One provider's line of a table: raw measurements, or the reason why there are none.

The fields are those of the result file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.memory import Memory
from benchmarks.providers.base import Provider
from benchmarks.shapes import Case


@dataclass
class Line:
    """Of any table."""

    provider: str
    note: str
    absent: str | None = None  # what this machine lacks for it
    unable: str | None = None  # why it does not do this work
    failure: str | None = None  # stands in place of what was measured

    @property
    def runs(self) -> bool:
        return self.absent is None and self.unable is None and self.failure is None


@dataclass
class Row(Line):
    """Of a case: time, memory, errors."""

    errors: dict[str, float] = field(default_factory=dict)  # by output, against the reference
    seconds: list[float] = field(default_factory=list)  # a sample for each round
    memory: Memory | None = None
    repeatable: bool | None = None  # a second run gives the same bits
    batch_invariant: bool | None = None  # half of the batch gives its rows the same bits
    alone: bool = False  # measured in a process of its own, not in turn with the others
    schedule: str | None = None  # of ours, which one ran


@dataclass
class AccuracyRow(Line):
    """Of an accuracy table: the provider's value less the exact one, token by token.

    Without a gradient log-probabilities and entropies, of a loss the rest.
    """

    logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)  # empty where it has none
    dhidden: list[float] = field(default_factory=list)  # norms of the differences of the rows
    errors: dict[str, float] = field(default_factory=dict)  # by output, as in a case


@dataclass
class SavingsRow(Line):
    """Of a savings table, where ``provider`` names a variant of ours."""

    base: str | None = None  # the variant whose time it is measured by
    errors: dict[str, float] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


def make_row(provider: Provider, case: Case, device: str) -> Row:
    """The row before any measurement."""
    return Row(
        provider.name,
        provider.note,
        absent=provider.absent(device),
        unable=provider.unable(case),
        alone=provider.timeout is not None,
    )


def describe(error: Exception) -> str:
    """One line, as a ``failure``."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
