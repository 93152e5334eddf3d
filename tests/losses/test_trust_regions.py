"""Losses with a trust region, held in numpy to the formulas of their papers."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from grpo_kernels.batch import Segments
from grpo_kernels.losses import check_loss_inputs
from grpo_kernels.losses.gates import binary_kl
from grpo_kernels.testing import make_config

# of tokens under the policy and the engine, and their advantages; ratios from 0.01 to 90
POLICY = np.array([0.5, 0.5, 0.9, 0.9, 0.1, 0.1, 0.9, 0.01, 0.3, 0.26, 0.999])
ENGINE = np.array([0.5, 0.5, 0.6, 0.6, 0.4, 0.4, 0.01, 0.9, 0.25, 0.3, 0.98])
ADVANTAGES = np.array([1.0, -1, 1, -1, 1, -1, 2, -2, 0.5, -0.5, 1])
RATIO = POLICY / ENGINE
TOKENS = len(POLICY)


def gradients(
    config: LossConfig, lengths: tuple[int, ...] = (TOKENS,), dtype: torch.dtype = torch.float64,
    old: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return minus the gradient of the summed loss by each log-probability."""
    logprobs = torch.tensor(np.log(POLICY), dtype=dtype, requires_grad=True)
    fields: dict[str, Any] = {"rollout_logprobs": torch.tensor(np.log(ENGINE), dtype=dtype)}
    if old is not None:
        fields["old_logprobs"] = torch.tensor(np.log(old), dtype=dtype)
    batch = TokenBatch.from_packed(
        torch.zeros(TOKENS, dtype=torch.int64),
        torch.tensor(ADVANTAGES, dtype=dtype),
        torch.tensor([0, *np.cumsum(lengths)]),
        num_items_in_batch=1.0,
        **fields,
    )
    (found,) = torch.autograd.grad(policy_loss(logprobs, batch, config).loss, logprobs)
    return -found.double().numpy()


def bernoulli_kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


TV = POLICY - ENGINE
FORWARD, BACKWARD = bernoulli_kl(ENGINE, POLICY), bernoulli_kl(POLICY, ENGINE)
AWAY = ADVANTAGES * TV > 0
UP = ADVANTAGES > 0
KEPT: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "dppo_tv": ({}, np.where(UP, TV <= 0.2, TV >= -0.2)),
    "dppo_tv, uneven": (
        {"dppo_tv_low": 0.4, "dppo_tv_high": 0.01}, np.where(UP, TV <= 0.01, TV >= -0.4),
    ),
    "dppo_kl": ({}, ~(AWAY & (FORWARD > 0.05))),
    "dppo_kl, uneven": (
        {"dppo_kl_low": 2.0, "dppo_kl_high": 0.001},
        ~(AWAY & (np.where(UP, 0.001, 2.0) < FORWARD)),
    ),
    "ipo": ({"ipo_tau": 0.0}, np.abs(TV) <= 0.1),
    "icepop": ({}, (RATIO >= 0.2) & (RATIO <= 5)),
    "kpop": ({}, (FORWARD <= 0.1) & (BACKWARD <= 0.1)),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_which_tokens_are_kept(name: str, dtype: torch.dtype) -> None:
    settings, kept = KEPT[name]
    assert 0 < kept.sum() < TOKENS
    loss_type = name.partition(",")[0]
    weight = RATIO.clip(max=20) if loss_type[:4] == "dppo" else RATIO
    found = gradients(LossConfig(loss_type=loss_type, **settings), dtype=dtype)
    np.testing.assert_allclose(found, kept * weight * ADVANTAGES, rtol=1e-5)


LENGTHS = (4, 0, 1, 6)
PARTS = [slice(0, 4), slice(4, 5), slice(5, 11)]


def of_sequences(values: np.ndarray, reduce: Any) -> np.ndarray:
    return np.concatenate([np.full(s.stop - s.start, reduce(values[s])) for s in PARTS])


def test_whole_sequences_are_dropped() -> None:
    kept = of_sequences(FORWARD, np.max) <= 0.5
    found = gradients(LossConfig(loss_type="trm", trm_threshold=0.5), LENGTHS)
    assert 0 < kept.sum() < TOKENS
    np.testing.assert_allclose(found, kept * RATIO * ADVANTAGES)
    mean = of_sequences(np.abs(RATIO - 1) / 2, np.mean)
    found = gradients(LossConfig(loss_type="vaco", vaco_threshold=0.2), LENGTHS)
    kept = ~(AWAY & (mean > 0.2))
    assert kept[mean > 0.2].any() and 0 < kept.sum() < TOKENS
    np.testing.assert_allclose(found, kept * RATIO * ADVANTAGES)


@pytest.mark.parametrize("delta,delta_b,w_min", [(0.2, 0.02, 0.8), (0.31, 0.1, 0.2), (0.05, 0, 1)])
def test_cppo(delta: float, delta_b: float, w_min: float) -> None:
    settings = {"cppo_delta": delta, "cppo_delta_b": delta_b, "cppo_w_min": w_min}
    kept = []
    for part in PARTS:
        distance, spent, weights = np.abs(TV[part]), 0.0, 0.0
        budget = np.clip(np.quantile(distance, 0.9), delta_b, 2 * delta_b)
        for t, moved in enumerate(distance):  # algorithm 1
            w = 1 - (1 - w_min) * t / max(len(distance) - 1, 1)
            kept.append(w * moved <= min(delta, delta + budget * weights - spent))
            spent, weights = spent + w * moved, weights + w
    kept = np.array(kept) | ~AWAY
    uniform = ~AWAY | (np.abs(TV) <= delta)
    assert (kept != uniform).any() or w_min == 1
    found = gradients(LossConfig(loss_type="cppo", **settings), LENGTHS)
    np.testing.assert_allclose(found, kept * RATIO * ADVANTAGES)


@pytest.mark.parametrize("high_only", (True, False))
def test_fipo(high_only: bool) -> None:
    old = POLICY / np.exp(np.linspace(-0.2, 0.15, TOKENS))
    old[7] = POLICY[7] / 5  # of a negative advantage
    ratio, future = POLICY / old, np.zeros(TOKENS)
    counted = np.where(ratio > 3, 0.0, np.log(ratio))
    for part in PARTS:
        for t in range(part.start, part.stop):
            later = np.arange(part.stop - t)
            future[t] = (counted[t : part.stop] * 2 ** (-later / 4)).sum()
    influence = np.exp(future).clip(1.0 if high_only else 0.8, 1.2)
    assert (influence > 1).any() and (high_only or (influence < 1).any())
    influence[7] = influence[7].clip(0.8, 1)
    clipped = (UP & (ratio > 1.2)) | (~UP & (ratio < 0.8)) | (~UP & (ratio > 3))
    config = LossConfig(
        loss_type="fipo", dual_clip=3.0, fipo_decay_rate=4, fipo_clip_high_only=high_only,
        rollout_correction_mode=None,
    )  # fmt: skip
    found = gradients(config, LENGTHS, old=old)
    np.testing.assert_allclose(found, ~clipped * ratio * influence * ADVANTAGES)


def test_gradients_of_clipped_tokens() -> None:
    low, high = ~UP & (RATIO < 0.8), UP & (RATIO > 1.2)
    common = {"rollout_correction_mode": None, "bypass_mode": True}
    weight = np.where(low, 0.75 * 0.8, np.where(high, 1.0 * 1.2, RATIO))
    found = gradients(LossConfig(loss_type="ce_gppo", **common))
    np.testing.assert_allclose(found, weight * ADVANTAGES)
    weight = np.where(UP, 1 / RATIO, RATIO).clip(max=3) * ~(low | high)
    assert (weight == 3).any() and low.any() and high.any()
    found = gradients(LossConfig(loss_type="aspo", **common))
    np.testing.assert_allclose(found, weight * ADVANTAGES)


@pytest.mark.parametrize("name,setting", [("ipo", "ipo_tau"), ("dppo_tv", "dppo_tau")])
def test_the_penalty_is_of_every_token(name: str, setting: str) -> None:
    base, tau = {"loss_type": name, setting: 0.0}, 0.3
    without, with_it = (gradients(LossConfig(**base | {setting: x})) for x in (0.0, tau))
    np.testing.assert_allclose(with_it - without, -2 * tau * np.log(RATIO))


def test_binary_kl_is_exact_and_finite() -> None:
    certain = torch.tensor([0.0, -1e-30, -1e-9, -1e-4, -0.7, -20.0, -90.0, -torch.inf])
    p, q = torch.cartesian_prod(certain, certain).unbind(1)
    assert binary_kl(p, q).isfinite().all()
    assert (binary_kl(p, p) == 0).all()
    x = np.array([1e-6, 0.01, 0.3, 0.7, 0.99, 1 - 1e-6])
    p, q = (v.ravel() for v in np.meshgrid(x, x))
    exact = bernoulli_kl(p, q)
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
        found = binary_kl(*(torch.tensor(np.log(v), dtype=dtype) for v in (p, q)))
        np.testing.assert_allclose(found.double(), exact, rtol=rtol, atol=rtol / 10)


def segments(*lengths: int) -> Segments:
    return Segments(torch.tensor([0, *np.cumsum(lengths, dtype=np.int64)]), sum(lengths))


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
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
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


LOG_RATIO = np.log(RATIO)
# of the divergence of the policy from the engine, as verl has them; of k1 the bounds are exp's
ESTIMATES = {"k1": -LOG_RATIO, "k2": LOG_RATIO**2 / 2, "k3": RATIO - 1 - LOG_RATIO}
LEVELS = {"token": None, "sequence_sum": np.sum, "sequence_mean": np.mean, "sequence_max": np.max}


@pytest.mark.parametrize("low,high", [(None, 3.0), (0.5, 2.0), (None, 0.05)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_rejection(level: str, estimate: str, low: float | None, high: float) -> None:
    if (level, estimate) == ("sequence_max", "k1"):
        return
    held = ESTIMATES[estimate]
    held = held if LEVELS[level] is None else of_sequences(held, LEVELS[level])
    held = np.exp(held) if estimate == "k1" else held
    config = LossConfig(
        loss_type="pg", rollout_correction_mode=f"{level}_{estimate}",
        rollout_correction_max=high, rollout_correction_min=low,
    )  # fmt: skip
    kept = (held >= (low or 0)) & (held <= high)
    np.testing.assert_allclose(gradients(config, LENGTHS), kept * ADVANTAGES)
    # the policy is as far from the engine where the ratio is, too
    gated = LossConfig(
        loss_type="icepop", rollout_correction_mode=f"{level}_{estimate}",
        rollout_correction_max=high, rollout_correction_min=low, icepop_low=1e-9, icepop_high=1e9,
    )  # fmt: skip
    np.testing.assert_allclose(gradients(gated, LENGTHS), kept * RATIO * ADVANTAGES)


def test_weights_of_sequences_without_old_logprobs() -> None:
    """Seq-TIS, Seq-MIS by the geometric mean: of policy gradients, by the policy itself."""
    product, geometric = of_sequences(LOG_RATIO, np.sum), np.exp(of_sequences(LOG_RATIO, np.mean))
    truncated = LossConfig(
        loss_type="pg", rollout_correction_mode="sequence_truncate", rollout_correction_max=2.0
    )
    expected = np.exp(product).clip(max=2) * ADVANTAGES
    np.testing.assert_allclose(gradients(truncated, LENGTHS), expected)
    masked = LossConfig(
        loss_type="pg", rollout_correction_mode="geometric_mask", rollout_correction_max=0.9,
        rollout_correction_min=0.2,
    )  # fmt: skip
    kept = (geometric >= 0.2) & (geometric <= 0.9)
    assert kept.any() and not kept.all()
    expected = kept * np.exp(product) * ADVANTAGES
    np.testing.assert_allclose(gradients(masked, LENGTHS), expected)


def test_bypass_mode() -> None:
    """The engine's log-probabilities are the old ones, and nothing is weighted twice."""
    bypassed = LossConfig(bypass_mode=True)
    decoupled = LossConfig(rollout_correction_mode=None)
    expected = gradients(decoupled, old=ENGINE)
    np.testing.assert_array_equal(gradients(bypassed), expected)
    np.testing.assert_array_equal(gradients(bypassed, old=POLICY * 0.5), expected)
    against_old = LossConfig(loss_type="icepop", bypass_mode=False, rollout_correction_mode=None)
    assert not gradients(against_old, old=POLICY * 0.01).any()
    assert gradients(LossConfig(loss_type="icepop"), old=POLICY * 0.01).any()


def test_what_the_engine_does_not_know_is_against_the_old_policy() -> None:
    unknown = torch.tensor([[-0.5, torch.nan]])
    logprobs = torch.tensor([[-0.4, -0.3]], requires_grad=True)
    old = torch.tensor([[-2.0, -0.6]])

    def ratios(**fields: Tensor) -> Tensor:
        batch = TokenBatch.from_padded(
            torch.zeros(1, 2, dtype=torch.int64), torch.ones(1), rollout_logprobs=unknown,
            num_items_in_batch=1.0, **fields,
        )  # fmt: skip
        loss = policy_loss(logprobs, batch, LossConfig(loss_type="icepop")).loss
        return -torch.autograd.grad(loss, logprobs)[0]

    torch.testing.assert_close(ratios(), torch.tensor([[0.1, 0.0]]).exp())
    torch.testing.assert_close(ratios(old_logprobs=old), torch.tensor([[0.1, 0.3]]).exp())


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
