"""Laws of all registered losses beside those of ``tests/net``, which has to know each of them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import LossConfig, Metrics, TokenBatch, policy_loss
from grpo_kernels.batch import Segments
from grpo_kernels.losses import AGGREGATIONS, LOSSES, Stat, check_loss_inputs
from grpo_kernels.losses.gates import binary_kl
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


def test_binary_kl_is_exact_and_finite() -> None:
    certain = torch.tensor([0.0, -1e-30, -1e-9, -1e-4, -0.7, -20.0, -90.0, -torch.inf])
    p, q = torch.cartesian_prod(certain, certain).unbind(1)
    assert binary_kl(p, q).isfinite().all()
    assert (binary_kl(p, p) == 0).all()
    x = torch.tensor([1e-6, 0.01, 0.3, 0.7, 0.99, 1 - 1e-6], dtype=torch.float64)
    p, q = torch.cartesian_prod(x, x).unbind(1)
    exact = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
        got = binary_kl(p.log().to(dtype), q.log().to(dtype)).double()
        torch.testing.assert_close(got, exact, rtol=rtol, atol=rtol / 10)


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


# --- sums along sequences


def segments(*lengths: int) -> Segments:
    return Segments(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))


@pytest.mark.parametrize("decay", (1.0, 0.5, 2 ** (-1 / 32)))
@pytest.mark.parametrize("backwards", (False, True))
@pytest.mark.parametrize("lengths", [(), (0,), (1,), (0, 3, 1, 0, 70), (129, 128)])
def test_running_sums(decay: float, backwards: bool, lengths: tuple[int, ...]) -> None:
    values = torch.randn(sum(lengths), dtype=torch.float64)
    found = segments(*lengths).running_sum(values, decay, backwards)
    expected: list[float] = []
    for part in values.split(lengths):
        sums, total = [], 0.0
        for value in part.flip(0) if backwards else part:
            total = total * decay + float(value)
            sums.append(total)
        expected += reversed(sums) if backwards else sums
    torch.testing.assert_close(found, values.new_tensor(expected), rtol=1e-12, atol=1e-12)
    # a sequence has the bits that it has alone
    alone = [segments(len(x)).running_sum(x, decay, backwards) for x in values.split(lengths)]
    assert torch.equal(found, torch.cat([values[:0], *alone]))


def test_extremes_of_sequences() -> None:
    lengths = (0, 5, 1, 0, 12)
    values = torch.rand(18, dtype=torch.float64)
    parts = [part for part in values.split(lengths) if len(part)]
    occupied = torch.tensor(lengths) > 0
    found = segments(*lengths)
    assert torch.equal(found.max(values)[occupied], torch.stack([x.max() for x in parts]))
    assert (found.max(values)[~occupied] == 0).all()
    exact = torch.stack([x.quantile(0.9) for x in parts])
    torch.testing.assert_close(found.quantile(values, 0.9)[occupied], exact)
    assert segments(0, 0).quantile(values[:0], 0.9).shape == (2,)
    assert torch.equal(found.places, torch.cat([torch.arange(n) for n in lengths]))


@pytest.mark.parametrize("name", ("cppo", "fipo"))
def test_sums_along_sequences_need_whole_ones(name: str) -> None:
    values = torch.zeros(1, 2)
    batch = TokenBatch.from_padded(values.long(), torch.ones(1), rollout_logprobs=values)
    config = make_config(name)
    assert config.scope() == "prefix"
    check_loss_inputs(batch, config)
    shared: Any = SimpleNamespace()
    with pytest.raises(ValueError, match=f"^sequence_group: expected None for {name}, .*in order"):
        check_loss_inputs(replace(batch, sequence_group=shared), config)


# --- means

LENGTHS = (3, 1, 0, 4, 2, 2)  # of three prompts, two sequences each
ADVANTAGES = torch.tensor([1.0, -1.0, 0.0, 0.0, 2.0, -0.5], dtype=torch.float64)
PROMPT_TOKENS = torch.tensor([4, 4, 4, 4, 4, 4])
LOGPROBS = -torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(4) < torch.tensor(LENGTHS)[:, None]


def loss_of(config: LossConfig, sequences: list[int], **fields: Any) -> Tensor:
    tokens = PROMPT_TOKENS[sequences]
    target = torch.zeros(len(sequences), 4, dtype=torch.int64)
    fields = {"prompt_tokens": tokens} | fields
    batch = TokenBatch.from_padded(target, ADVANTAGES[sequences], MASK[sequences], **fields)
    return policy_loss(LOGPROBS[sequences], batch, config).loss


def by(name: str, **settings: Any) -> LossConfig:
    return LossConfig(loss_type="pg", loss_aggregation=name, max_completion_length=5, **settings)


EVERY = list(range(6))


def test_shuffled_micro_batches_of_prompts_add_up() -> None:
    parts = [
        loss_of(by("prompt_mean"), part, num_prompts=3.0, gradient_accumulation_steps=2)
        for part in ([0, 3, 4], [5, 1, 2])
    ]
    torch.testing.assert_close(sum(parts), loss_of(by("prompt_mean"), EVERY))


@pytest.mark.parametrize("excludes", (False, True))
@pytest.mark.parametrize("name", AGGREGATIONS)
def test_pieces_of_a_micro_batch_add_up(name: str, excludes: bool) -> None:
    """Unequal ones, each of which is told the numbers of the whole."""
    settings: dict[str, Any] = {"exclude_zero_variance": excludes}
    kept = [i for i in EVERY if ADVANTAGES[i] or not excludes]
    tokens, steps = sum(LENGTHS[i] for i in kept), 2
    told: dict[str, Any] = {
        "num_tokens_in_micro_batch": tokens,
        "num_items_in_batch": steps * tokens,
        "num_sequences_in_micro_batch": torch.tensor(len(kept)),
        "num_prompts": steps * (2 if excludes else 3),
        "gradient_accumulation_steps": steps,
    }
    parts = [loss_of(by(name, **settings), part, **told) for part in ([5], [0, 2, 4, 1], [3])]
    whole = loss_of(by(name, **settings), EVERY) / steps
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("name", LOSSES)
def test_another_aggregation_is_as_that_of_a_loss_that_has_it(name: str) -> None:
    if LOSSES[name].surrogate is not LOSSES["grpo"].surrogate:
        return
    own = LossConfig(loss_type=name, max_completion_length=5, importance_sampling_level="token")
    other = LossConfig(loss_aggregation=LOSSES[name].aggregation, max_completion_length=5)
    torch.testing.assert_close(loss_of(other, EVERY), loss_of(own, EVERY))
