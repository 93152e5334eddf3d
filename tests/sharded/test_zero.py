"""Heads under real DeepSpeed, in an environment of its own: ``make test-sharded``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sharded.ranks import run_on_ranks
from tests.sharded.zero_cases import cases


@pytest.mark.slow
@pytest.mark.deepspeed
def test_zero_equals_one_process(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    verdicts = run_on_ranks(cases, 2, tmp_path)
    assert {name: verdict for name, verdict in verdicts.items() if verdict} == {}
