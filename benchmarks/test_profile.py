"""The time of a step on a GPU: its kernels, and the work of the CPU next to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.conftest import Session
from benchmarks.problem import make_problem
from benchmarks.providers.ours import run
from benchmarks.shapes import make_case

_SHOWN = 25  # kernels of the table


@pytest.mark.parametrize("tokens", [8192, 1024])
def test_profile(
    benchmark: Any, session: Session, request: pytest.FixtureRequest, tokens: int
) -> None:
    """Print the kernels of a loss; with ``--results`` keep a trace to look at."""
    if session.device != "cuda":
        pytest.skip("needs a GPU")
    session.begin()
    problem = make_problem(make_case("dapo", "qwen3-1.7b", tokens, "bf16"), "cuda")

    def step() -> None:
        run(problem)
        torch.cuda.synchronize()

    benchmark.pedantic(step, rounds=10, warmup_rounds=3)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        step()
    print(found.key_averages().table(sort_by="self_device_time_total", row_limit=_SHOWN))
    if folder := request.config.getoption("--results"):
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / f"gpu-trace-{tokens}.json"))
