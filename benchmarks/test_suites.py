"""The other suites: ``python -m pytest benchmarks/test_suites.py --benchmark-only [--full]``."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.accuracy.measure import measure_accuracy
from benchmarks.conftest import Session
from benchmarks.figures import is_ours
from benchmarks.replay import replay
from benchmarks.results import SavingsTable, TrainingTable
from benchmarks.savings import VARIANTS, measure_savings
from benchmarks.suites import Entry
from benchmarks.training.measure import measure_training
from benchmarks.training.providers import PROVIDERS
from benchmarks.training.task import choose

_ROUNDS = 5  # of whole steps, and of what is saved in one


def test_accuracy(benchmark: Any, accuracy_entry: Entry, session: Session) -> None:
    """Measure errors on a policy's distributions."""
    session.begin(accuracy_entry)
    start = time.perf_counter()
    case, slow = accuracy_entry.case, accuracy_entry.slow
    found = measure_accuracy(case, session.device, slow=slow, deadline=session.deadline)
    benchmark.group = "measuring errors on a policy's distributions"
    replay(benchmark, [time.perf_counter() - start])
    session.keep("accuracy", found)
    assert not [row for row in found.rows if row.failure and is_ours(row.provider)]


@pytest.fixture(scope="session")
def savings(savings_entry: Entry, session: Session) -> SavingsTable:
    session.begin(savings_entry)
    table = measure_savings(savings_entry.case, session.device, _ROUNDS, session.deadline)
    session.keep("savings", table)
    return table


@pytest.mark.parametrize("name", [variant.name for variant in VARIANTS])
def test_savings(benchmark: Any, savings: SavingsTable, name: str) -> None:
    """Time what skipped rows and an adapter on the head save."""
    (row,) = [row for row in savings.rows if row.provider == name]
    assert row.failure is None
    benchmark.group = f"savings, {savings.model}, T={savings.tokens}, {savings.dtype}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)


@pytest.fixture(scope="session")
def training(session: Session) -> TrainingTable:
    session.begin()
    config = choose(session.device, full=not session.quick)
    table = measure_training(config, session.device, _ROUNDS, deadline=session.deadline)
    session.keep("training", table)
    return table


@pytest.mark.parametrize("name", [provider.name for provider in PROVIDERS])
def test_training_step(
    benchmark: Any, session: Session, training: TrainingTable, name: str
) -> None:
    """Time a whole training step, ours beside TRL's."""
    (row,) = [row for row in training.rows if row.provider == name]
    session.judge(row)
    benchmark.group = f"training step, {training.model}, {training.dtype}"
    benchmark.extra_info["errors"] = row.errors
    replay(benchmark, row.seconds)
