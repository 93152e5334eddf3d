"""Weights against the rollout engine that the caller has made, in place of log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import TokenBatch, explain, linear_policy_loss
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import make_config, make_problem
from tests.support.targets import targets


@pytest.mark.parametrize("backend,device", [*targets(), ("reference", torch.device("cpu"))])
@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.filterwarnings("ignore:cispo uses")
def test_they_are_what_a_correction_makes(
    backend: str, device: torch.device, loss_type: str
) -> None:
    problem = make_problem(3, 5, 8, 37).to(device, torch.float32)
    logprobs = problem.logprobs
    weights = (logprobs["old_logprobs"] - logprobs["rollout_logprobs"]).exp()
    config = make_config(loss_type, beta=0.1, rollout_correction_mode="token_truncate")
    found = []
    for rollout in (
        {"rollout_logprobs": logprobs["rollout_logprobs"]},
        {"rollout_weights": weights.clamp(max=config.rollout_correction_max)},
    ):
        batch = TokenBatch.from_padded(
            problem.target, problem.advantages, problem.mask,
            old_logprobs=logprobs["old_logprobs"], ref_logprobs=logprobs["ref_logprobs"], **rollout,
        )  # fmt: skip
        hidden = problem.hidden.detach().clone().requires_grad_()
        weight = problem.weight.detach().clone().requires_grad_()
        loss, metrics = linear_policy_loss(hidden, weight, batch, config, backend=backend)
        loss.backward()
        ratio = metrics["sampling/importance_sampling_ratio/mean"]
        found.append((loss.detach(), hidden.grad, weight.grad, ratio))
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-7)


def batch_of(**optional: Tensor) -> TokenBatch:
    return TokenBatch.from_padded(torch.ones(2, 3, dtype=torch.int64), torch.ones(2), **optional)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_values_are_named(value: float) -> None:
    weights = torch.ones(2, 3)
    weights[1, 2] = value
    with pytest.raises(ValueError, match="rollout_weights: expected finite values >= 0 on valid"):
        batch_of(rollout_weights=weights)


def test_two_corrections_are_refused() -> None:
    ones = torch.ones(2, 3)
    batch = batch_of(rollout_weights=ones, rollout_logprobs=-ones)
    hidden, weight = torch.ones(2, 3, 4), torch.ones(5, 4)
    with pytest.raises(ValueError, match="rollout_weights: expected None where rollout_correction"):
        explain(hidden, weight, batch, make_config("dapo", rollout_correction_mode="token_mask"))
    explain(hidden, weight, batch, make_config("dapo", rollout_correction_mode=None))
