"""A step under torch's alarm for host synchronizations: with lengths given it waits for nothing."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.testing import make_problem

LOSSES = {
    "dapo": {},
    "dapo, KL": {"beta": 0.04},
    "gspo": {"loss_type": "gspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["one_pass", "two_pass"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_waits_for_nothing(name: str, schedule: str) -> None:
    problem = make_problem(4, 256, 896, 50257).to("cuda", torch.bfloat16)
    config = LossConfig(**LOSSES[name])
    lengths = tuple(problem.mask.sum(1).tolist())

    def step() -> None:
        old, ref = (problem.logprobs[key].float() for key in ("old_logprobs", "ref_logprobs"))
        batch = TokenBatch.from_padded(
            problem.target, problem.advantages, problem.mask,
            old_logprobs=old, ref_logprobs=ref if config.beta else None, lengths=lengths,
        )  # fmt: skip
        out = linear_policy_loss(problem.hidden, problem.weight, batch, config, schedule=schedule)
        torch.autograd.grad(out.loss, (problem.hidden, problem.weight))

    for _ in range(2):  # compiles, and makes workspaces
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
