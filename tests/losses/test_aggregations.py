"""Means over prompts, and without what has no advantage, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, policy_loss
from grpo_kernels.losses import AGGREGATIONS, LOSSES

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


def terms(sequence: int) -> list[float]:
    """Return the tokens' losses of the plain policy gradient."""
    values = LOGPROBS[sequence, : LENGTHS[sequence]]
    return (-ADVANTAGES[sequence] * values).tolist()


def config(name: str, **settings: Any) -> LossConfig:
    return LossConfig(loss_type="pg", loss_aggregation=name, max_completion_length=5, **settings)


def mean(values: list[float]) -> float:
    return sum(values) / max(len(values), 1)


EVERY = list(range(6))
BY_HAND = {
    "prompt_mean": lambda kept: mean(
        [mean(terms(i) + terms(i + 1)) for i in (0, 2, 4) if i in kept or i + 1 in kept]
    ),
    "sequence_mean": lambda kept: mean([mean(terms(i)) for i in kept]),
    "sequence_sum": lambda kept: mean([sum(terms(i)) for i in kept]),
    "fixed_length": lambda kept: mean([sum(terms(i)) / 5 for i in kept]),
    "token_mean": lambda kept: mean([x for i in kept for x in terms(i)]),
    "window_token_mean": lambda kept: mean([x for i in kept for x in terms(i)]),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_by_hand(name: str) -> None:
    assert loss_of(config(name), EVERY).item() == pytest.approx(BY_HAND[name](EVERY))
    kept = [0, 1, 4, 5]
    excluding = loss_of(config(name, exclude_zero_variance=True), EVERY).item()
    assert excluding == pytest.approx(BY_HAND[name](kept))
    # as without these sequences
    assert excluding == pytest.approx(loss_of(config(name), kept).item())
    assert loss_of(config(name, exclude_zero_variance=True), [2, 3]) == 0


def test_what_is_excluded_has_no_penalty() -> None:
    settings: dict[str, Any] = {"beta": 0.5, "exclude_zero_variance": True}
    fields = {"ref_logprobs": LOGPROBS - 0.3}
    whole = loss_of(config("sequence_mean", **settings), EVERY, **fields)
    kept = [0, 1, 4, 5]
    fields = {"ref_logprobs": LOGPROBS[kept] - 0.3}
    part = loss_of(config("sequence_mean", **settings), kept, **fields)
    torch.testing.assert_close(whole, part)


def test_shuffled_micro_batches_of_prompts_add_up() -> None:
    parts = [
        loss_of(config("prompt_mean"), part, num_prompts=3.0, gradient_accumulation_steps=2)
        for part in ([0, 3, 4], [5, 1, 2])
    ]
    torch.testing.assert_close(sum(parts), loss_of(config("prompt_mean"), EVERY))


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
    parts = [loss_of(config(name, **settings), part, **told) for part in ([5], [0, 2, 4, 1], [3])]
    whole = loss_of(config(name, **settings), EVERY) / steps
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("name", LOSSES)
def test_another_aggregation_is_as_that_of_a_loss_that_has_it(name: str) -> None:
    if LOSSES[name].surrogate is not LOSSES["grpo"].surrogate:
        return
    own = LossConfig(loss_type=name, max_completion_length=5, importance_sampling_level="token")
    by = LossConfig(loss_aggregation=LOSSES[name].aggregation, max_completion_length=5)
    torch.testing.assert_close(loss_of(by, EVERY), loss_of(own, EVERY))
