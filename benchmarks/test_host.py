"""The CPU time of a step, with a head so small that the device has nothing to do."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.conftest import Session
from grpo_kernels import LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.testing import make_problem
from tests.schedule.test_operations import Operations


@pytest.mark.benchmark(timer=time.thread_time)  # other load of this machine doesn't count
@pytest.mark.parametrize("part", ["batch", "loss"])
def test_host(benchmark: Any, session: Session, part: str) -> None:
    """Time building a ``TokenBatch``, or a forward and backward; no metric is read."""
    problem = make_problem(4, 8, 16, 67).to(session.device, torch.float32)
    config = LossConfig(loss_type="dapo")

    def batch() -> TokenBatch:
        return problem.batch(ref_logprobs=None, rollout_logprobs=None)

    made = batch()

    def loss() -> torch.Tensor:
        out = linear_policy_loss(problem.hidden, problem.weight, made, config)
        out.loss.backward()
        return out.loss.detach()

    work = {"batch": batch, "loss": loss}[part]
    reference = linear_policy_loss(
        problem.hidden, problem.weight, made, config, backend="reference"
    )
    torch.testing.assert_close(loss(), reference.loss.detach())
    benchmark.pedantic(work, rounds=200, warmup_rounds=20)
    with Operations() as operations:
        work()
    benchmark.extra_info["operations"] = operations.count
