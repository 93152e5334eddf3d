"""Tiles whose rows are longer than the vocabulary, as on a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from grpo_kernels.testing import assert_all_as_exact_as, make_config, make_problem, run
from tests.support.targets import targets

FLOOR = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("dtype", FLOOR, ids=str)
@pytest.mark.parametrize("schedule", ["one_pass", "two_pass"])
def test_rows_with_a_gap(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    schedule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("engine.sweep", "engine.recompute"):
        place = sys.modules[f"grpo_kernels.{name}"]
        monkeypatch.setattr(place, "row_pitch", lambda columns, dtype, device: columns + 11)
    config, posed = make_config("dapo", beta=0.05), make_problem()
    exact = run(posed, config, backend="reference")
    problem = posed.to(device, dtype)
    eager = run(problem, config, backend="reference")
    ours = run(problem, config, backend=backend, schedule=schedule, max_workspace_bytes=53 * 4 * 8)
    assert_all_as_exact_as(ours, eager, exact, FLOOR[dtype])
