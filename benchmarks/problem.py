"""One off-policy GRPO batch: the inputs that every provider gets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.shapes import Shape
from grpo_kernels import LossConfig, TokenBatch

CONFIG = LossConfig(loss_type="dapo", epsilon=0.2)
_LOG_RATIOS = (-0.35, -0.1, 0.0, 0.1, 0.3)


@dataclass(frozen=True)
class Problem:
    """Inputs of the loss. All tokens are valid, and the log-probabilities moved since sampling."""

    hidden: Tensor  # (B, L, D), a leaf that needs a gradient
    weight: Tensor  # (V, D), likewise
    target: Tensor  # (B, L) int64
    advantages: Tensor  # (B,) fp32
    old_logprobs: Tensor  # (B, L) fp32

    def batch(self) -> TokenBatch:
        return TokenBatch.from_padded(self.target, self.advantages, old_logprobs=self.old_logprobs)


@dataclass(frozen=True)
class Result:
    """What a provider returns for the loss: its value and both gradients."""

    loss: Tensor  # ()
    dhidden: Tensor  # (B, L, D)
    dweight: Tensor  # (V, D)


def make_problem(
    shape: Shape, dtype: torch.dtype, seed: int = 0, constant_old: bool = False
) -> Problem:
    """Random inputs.

    ``constant_old`` sets the old log-probabilities without a product, so that no library keeps a
    buffer from it; for measurements of memory, which does not depend on values.

    The logits have a standard deviation of 2. Two fifths of the ratios are clipped, and none is so
    near to its bound that rounding the logits to 16 bits would move it across.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.empty(shape.sequences, shape.length, shape.hidden, dtype=dtype)
    weight = torch.empty(shape.vocabulary, shape.hidden, dtype=dtype)
    hidden.normal_(generator=generator)
    weight.normal_(std=2 / shape.hidden**0.5, generator=generator)
    target = torch.randint(shape.vocabulary, (shape.sequences, shape.length), generator=generator)
    advantages = torch.linspace(-1.0, 1.5, shape.sequences)
    if constant_old:
        old = torch.full(target.shape, -10.0)
    else:
        choice = torch.randint(len(_LOG_RATIOS), target.shape, generator=generator)
        old = _logprobs(hidden, weight, target) - torch.tensor(_LOG_RATIOS)[choice]
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), target, advantages, old)


def detached(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same values in ``dtype``, without gradients."""
    return replace(
        problem, hidden=problem.hidden.detach().to(dtype), weight=problem.weight.detach().to(dtype)
    )


def _logprobs(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """(B, L) fp32 log-probabilities, a few rows at a time."""
    rows = hidden.flatten(0, 1).split(32)
    targets = target.flatten().split(32)
    parts = [
        torch.mm(x, weight.t()).float().log_softmax(-1).gather(-1, y[:, None])
        for x, y in zip(rows, targets, strict=True)
    ]
    return torch.cat(parts).view(target.shape)
