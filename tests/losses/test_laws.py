"""Laws of all registered losses beside those of ``tests/net``, which has to know each of them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from grpo_kernels.losses import LOSSES
from grpo_kernels.losses.surrogates import Clip
from grpo_kernels.testing import make_config, make_problem
from tests.net import cases

# at ratio 1 the gradient is -w A: these surrogates start out as plain policy gradient


def variants() -> list[tuple[str, dict[str, object]]]:
    options: list[dict[str, object]] = [
        {},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False, "kl_estimator": "k2"},
        {"off_policy_mask_threshold": 0.05, "entropy_coef": 0.02},
        {"top_entropy_quantile": 0.5, "entropy_coef": 0.02},
        {"delta": 1.5, "dual_clip": 3.0},
        {"rollout_correction_mode": "token_mask", "rollout_correction_max": 1.1},
    ]
    return [
        (name, option)
        for name in LOSSES
        for option in options
        if "delta" not in option or LOSSES[name].surrogate is Clip
    ]


def adding_up() -> list[tuple[str, dict[str, object]]]:
    """Return the variants that do not compare the tokens of a micro-batch with one another."""
    return [
        (name, option)
        for name, option in variants()
        if make_config(name, **option).scope(has_rollout=True) != "batch"
    ]


@pytest.mark.parametrize("name,option", adding_up())
def test_gradient_accumulation_adds_up_to_one_batch(name: str, option: dict[str, object]) -> None:
    problem, config = make_problem(2, 4), make_config(name, **option)

    def loss_of(rows: slice, steps: int) -> Tensor:
        batch = TokenBatch.from_padded(
            problem.target[rows],
            problem.advantages[rows],
            num_items_in_batch=23.0,
            gradient_accumulation_steps=steps,
            **{name: x[rows] for name, x in problem.logprobs.items()},
        )
        own = problem.logprobs["old_logprobs"][rows] + 0.2
        return policy_loss(own.flatten(), batch, config, own.flatten().square()).loss

    parts = loss_of(slice(0, 1), 2) + loss_of(slice(1, 2), 2)
    torch.testing.assert_close(parts, loss_of(slice(0, 2), 1))


def test_generated_cases_have_every_loss() -> None:
    assert set(cases.LOSSES) == set(LOSSES)


def test_cispo_warns_below_one() -> None:
    with pytest.warns(UserWarning, match="raw upper bound"):
        LossConfig(loss_type="cispo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossConfig(loss_type="cispo", epsilon_high=5.0)
