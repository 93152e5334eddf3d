"""Values of single formulas against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import LossConfig, Metrics, policy_loss
from grpo_kernels.losses import Stat
from grpo_kernels.losses.gates import top_entropy_gate
from grpo_kernels.losses.kl import KL_ESTIMATORS
from grpo_kernels.testing import make_problem


@pytest.mark.parametrize("dtype,rtol", [(torch.float32, 2e-6), (torch.float64, 1e-9)])
def test_k3_keeps_its_digits(dtype: torch.dtype, rtol: float) -> None:
    x = torch.logspace(-6, 1, 200, dtype=dtype)
    x = torch.cat([-x, x]).requires_grad_()
    kl = KL_ESTIMATORS["k3"](x)
    (gradient,) = torch.autograd.grad(kl.sum(), x)
    exact = x.detach().double()
    torch.testing.assert_close(kl.double(), exact.expm1() - exact, rtol=rtol, atol=0)
    torch.testing.assert_close(gradient.double(), exact.expm1(), rtol=rtol, atol=0)


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
