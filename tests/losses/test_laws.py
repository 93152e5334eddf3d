"""Laws of all registered losses beside those of ``tests/net``, which has to know each of them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import LossConfig, Metrics, TokenBatch, policy_loss
from grpo_kernels.losses import LOSSES, Stat
from grpo_kernels.losses.surrogates import Clip
from grpo_kernels.losses.terms import KL_ESTIMATORS, top_entropy_gate
from grpo_kernels.testing import make_config, make_problem
from tests.net import cases
from tests.support import launch


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


def test_dual_clip_does_not_hide_nan() -> None:
    batch = TokenBatch.from_padded(
        torch.tensor([[1, 2]]), torch.tensor([-1.0]), old_logprobs=torch.zeros(1, 2)
    )
    config = LossConfig(loss_type="grpo", dual_clip=3.0)
    capped = policy_loss(torch.tensor([5.0, 0.0]), batch, config)
    assert capped.loss.item() == pytest.approx((3 + 1) / 2)
    assert policy_loss(torch.tensor([torch.nan, 0.0]), batch, config).loss.isnan()


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
    missing = ", ".join(set(LOSSES) - set(cases.LOSSES))
    advice = "add it to tests/net/cases.py, and its formula to tests/net/oracle.py"
    assert not missing, f"{missing}: {advice}"
    assert set(cases.LOSSES) == set(LOSSES)


def test_cispo_warns_below_one() -> None:
    with pytest.warns(UserWarning, match="raw upper bound"):
        LossConfig(loss_type="cispo")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LossConfig(loss_type="cispo", epsilon_high=5.0)


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


SHARES = (5, 12)  # tokens of each process


def entropies() -> torch.Tensor:
    return torch.rand(sum(SHARES), generator=torch.Generator().manual_seed(0))


def gate() -> torch.Tensor:
    return top_entropy_gate(entropies().split(SHARES)[dist.get_rank()], 0.3)


@pytest.mark.slow
def test_two_processes_gate_as_one() -> None:
    assert torch.equal(torch.cat(launch.run(gate)), top_entropy_gate(entropies(), 0.3))
