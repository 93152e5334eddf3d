"""TRL's trainers with our head log what they log with their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import trl_sharded_cases
from tests.integrations.trl_cases import cases
from tests.sharded.ranks import run_alone, run_on_ranks


@pytest.mark.slow
def test_trl(tmp_path: Path) -> None:
    """In a process of its own, where no other trainer of TRL is."""
    verdicts = run_alone(cases, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}


@pytest.mark.slow
def test_sharded(tmp_path: Path) -> None:
    verdicts = run_on_ranks(trl_sharded_cases.cases, 2, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}


@pytest.mark.slow
@pytest.mark.deepspeed
def test_zero(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    verdicts = run_on_ranks(trl_sharded_cases.zero_cases, 2, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}
