"""Sums along sequences and clipped weights, held in numpy to their papers at ratios up to 90.

Generated cases see the gates of the other losses, but few of them reach the ends of these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_kernels import LossConfig, TokenBatch, policy_loss

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


TV = POLICY - ENGINE
AWAY = ADVANTAGES * TV > 0
UP = ADVANTAGES > 0
LENGTHS = (4, 0, 1, 6)
PARTS = [slice(0, 4), slice(4, 5), slice(5, 11)]


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
