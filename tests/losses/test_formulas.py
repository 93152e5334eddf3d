"""Values of single formulas against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, Metrics, TokenBatch, policy_loss
from grpo_kernels.losses import Stat
from grpo_kernels.losses.gates import top_entropy_gate
from grpo_kernels.losses.kl import KL_ESTIMATORS
from grpo_kernels.testing import make_problem

LOG2 = math.log(2.0)


def two_tokens(advantage: float, log_ratio: float, **extra: Tensor) -> tuple[Tensor, TokenBatch]:
    logprobs = torch.full((2,), -1.0, dtype=torch.float64)
    batch = TokenBatch.from_packed(
        torch.zeros(2, dtype=torch.int64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([0, 2]),
        old_logprobs=logprobs - log_ratio,
        **extra,
    )
    return logprobs, batch


@pytest.mark.parametrize(
    "fields,advantage,log_ratio,expected",
    [
        ({}, 1.0, LOG2, -1.2),  # clipped from above
        ({}, -1.0, LOG2, 2.0),  # not clipped for a negative advantage
        ({}, -1.0, -LOG2, 0.8),  # clipped from below
        ({"epsilon_high": 0.5}, 1.0, LOG2, -1.5),
        ({"delta": 1.6}, -1.0, LOG2, 1.6),
        ({"dual_clip": 1.5}, -1.0, LOG2, 1.5),
        ({"dual_clip": 1.5}, 1.0, LOG2, -1.2),
        ({"loss_type": "cispo", "epsilon_high": 1.5}, 1.0, LOG2, 1.5),  # -1.5 * 1 * (-1)
        ({"loss_type": "pg"}, 2.0, LOG2, 2.0),
        ({"loss_type": "topr"}, -1.0, -LOG2, -0.5),  # -0.5 * (-1) * (-1)
        ({"loss_type": "topr"}, -1.0, LOG2, -1.0),  # truncated to 1
        ({"loss_type": "gmpo"}, 1.0, LOG2, -math.exp(0.4)),
        ({"loss_type": "gmpo"}, -1.0, LOG2, 2.0),
        ({"loss_type": "sapo"}, 1.0, LOG2, -4 / (1 + math.exp(-1.0))),
        ({"loss_type": "vespo"}, 1.0, 0.0, 1.0),  # phi(1) = 1
        # w = 4: phi = exp(3 + 2 log 4 - 3 * 4)
        ({"loss_type": "vespo"}, 1.0, LOG2, math.exp(3 + 2 * math.log(4) - 12)),
    ],
)  # fmt: skip
def test_surrogates(
    fields: dict[str, object], advantage: float, log_ratio: float, expected: float
) -> None:
    logprobs, batch = two_tokens(advantage, log_ratio)
    loss = policy_loss(logprobs, batch, LossConfig(**fields)).loss
    torch.testing.assert_close(loss.item(), expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "estimator,correction,expected",
    [
        ("k1", False, -LOG2),
        ("k2", False, LOG2**2 / 2),
        ("k3", False, 2 - LOG2 - 1),
        ("abs", False, LOG2),
        ("k3", True, (2 - LOG2 - 1) * 1.1),
    ],
)
def test_kl(estimator: str, correction: bool, expected: float) -> None:
    reference = torch.full((2,), -1.0 + LOG2, dtype=torch.float64)
    logprobs, batch = two_tokens(0.0, math.log(1.1), ref_logprobs=reference)
    config = LossConfig(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=correction)
    out = policy_loss(logprobs, batch, config)
    torch.testing.assert_close(out.loss.item(), expected)
    torch.testing.assert_close(out.metrics["kl"].item(), expected)


@pytest.mark.parametrize("dtype,rtol", [(torch.float32, 2e-6), (torch.float64, 1e-9)])
def test_k3_keeps_its_digits(dtype: torch.dtype, rtol: float) -> None:
    x = torch.logspace(-6, 1, 200, dtype=dtype)
    x = torch.cat([-x, x]).requires_grad_()
    kl = KL_ESTIMATORS["k3"](x)
    (gradient,) = torch.autograd.grad(kl.sum(), x)
    exact = x.detach().double()
    torch.testing.assert_close(kl.double(), exact.expm1() - exact, rtol=rtol, atol=0)
    torch.testing.assert_close(gradient.double(), exact.expm1(), rtol=rtol, atol=0)


def uneven() -> tuple[Tensor, TokenBatch]:
    logprobs = torch.zeros(4, dtype=torch.float64)
    batch = TokenBatch.from_packed(
        torch.zeros(4, dtype=torch.int64),
        torch.tensor([-1.0, -4.0], dtype=torch.float64),
        torch.tensor([0, 3, 4]),
        num_items_in_batch=10,
        gradient_accumulation_steps=2,
    )
    return logprobs, batch


@pytest.mark.parametrize(
    "name,expected",
    [
        ("grpo", (1 + 4) / 2 / 2),
        ("bnpo", 7 / 4 / 2),
        ("dr_grpo", 7 / (2 * 5) / 2),
        ("dapo", 7 / 10),
        ("luspo", 7 / 2 / 2),
        ("gspo", (1 + 4) / 2 / 2),
    ],
)
def test_aggregation(name: str, expected: float) -> None:
    logprobs, batch = uneven()
    config = LossConfig(loss_type=name, max_completion_length=5)
    torch.testing.assert_close(policy_loss(logprobs, batch, config).loss.item(), expected)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_micro_batch_that_is_part_of_a_larger_one(as_tensor: bool) -> None:
    """bnpo and the entropy bonus divide by the larger one's tokens; the bonus has a factor."""
    logprobs, batch = uneven()
    given = [8.0, 0.25]
    tokens, factor = [torch.tensor(value) for value in given] if as_tensor else given
    batch = replace(batch, num_tokens_in_micro_batch=tokens, entropy_scale=factor)
    entropy = torch.tensor([1.0, 2.0, 3.0, 2.0], dtype=torch.float64)
    config = LossConfig(loss_type="bnpo", entropy_coef=0.5)
    loss = policy_loss(logprobs, batch, config, entropy).loss.item()
    torch.testing.assert_close(loss, (7 - 0.5 * 0.25 * 8) / 8 / 2)
    dapo = policy_loss(logprobs, batch, LossConfig()).loss.item()
    torch.testing.assert_close(dapo, 7 / 10)


@pytest.mark.parametrize(
    "mode,bounds,weights",
    [
        ("token_truncate", (None, 1.5), (0.5, 1.5)),
        ("token_truncate", (0.8, 1.5), (0.8, 1.5)),
        ("token_mask", (None, 1.5), (0.5, 0.0)),
        ("token_mask", (0.8, 3.0), (0.0, 2.0)),
        ("sequence_truncate", (None, 0.9), (0.9, 0.9)),  # product of 0.5 and 2 is 1
        ("sequence_mask", (None, 0.9), (0.0, 0.0)),
        ("sequence_mask", (None, 3.0), (1.0, 1.0)),
        (None, (None, 3.0), (1.0, 1.0)),
    ],
)
def test_rollout_correction(
    mode: str | None, bounds: tuple[float | None, float | None], weights: tuple[float, float]
) -> None:
    old = torch.full((2,), -1.0, dtype=torch.float64)
    sampled = old - torch.tensor([-LOG2, LOG2], dtype=torch.float64)
    logprobs, batch = two_tokens(1.0, 0.0, rollout_logprobs=sampled)
    config = LossConfig(
        rollout_correction_mode=mode,
        rollout_correction_min=bounds[0],
        rollout_correction_max=bounds[1],
    )
    out = policy_loss(logprobs, batch, config)
    torch.testing.assert_close(out.loss.item(), -sum(weights) / 2)
    difference = out.metrics["sampling/sampling_logp_difference/max"].item()
    assert difference == pytest.approx(LOG2)


@pytest.mark.slow
def test_top_entropy_gate_above_the_limit_of_torch_quantile() -> None:
    entropy = torch.arange(2**24 + 8, dtype=torch.float32)
    assert top_entropy_gate(entropy, 0.25).sum().item() == pytest.approx(2**22 + 2, abs=3)


def test_ratios_of_norms_merge_to_that_of_all_rows() -> None:
    error, norm = torch.rand(9, 5, dtype=torch.float64), torch.rand(9, 5, dtype=torch.float64)

    def stat(rows: slice) -> Metrics:
        squares = (x[rows].square().sum() for x in (error, norm))
        return Metrics({"error": Stat("norm_ratio", *squares)})

    merged = Metrics.merge([stat(slice(0, 2)), stat(slice(2, 2)), stat(slice(2, 9))])
    assert merged["error"].item() == pytest.approx((error.norm() / norm.norm()).item())
    assert stat(slice(0, 0))["error"].isnan()  # no row had a gradient


def test_metrics_of_parts_merge_to_the_metrics_of_the_whole() -> None:
    problem, config = make_problem(4, 6), LossConfig(rollout_correction_mode="token_mask")
    lengths = problem.mask.sum(1).tolist()
    batch = problem.batch()
    own = batch.old_logprobs + torch.randn(batch.num_tokens, dtype=torch.float64) / 2
    whole = policy_loss(own, batch, config, -own).metrics
    cut = sum(lengths[:1])  # at the end of a sequence
    parts = [
        policy_loss(own[a:b], batch.narrow(a, b), config, -own[a:b]).metrics
        for a, b in ((0, cut), (cut, batch.num_tokens))
    ]
    merged = Metrics.merge(parts)
    assert set(merged) == set(whole)
    for name, value in whole.items():
        torch.testing.assert_close(merged[name], value, msg=name)
