"""Log-probabilities and gradients by full rows of logits, a block of rows at a time.

In whatever dtype the inputs have: fp64 for the reference, fp32 for the problem's own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_BLOCK_ROWS = 128


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def statistics(
    hidden: Tensor,  # (T, D)
    target: Tensor,  # (T,)
    weight: Tensor,  # (V, D)
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (T,) log-probabilities and entropies."""
    logprobs, entropy = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
    for block in _blocks(hidden):
        logps = capped(torch.mm(hidden[block], weight.t()), softcap).log_softmax(-1)
        logprobs[block] = logps.gather(-1, target[block, None]).squeeze(-1)
        entropy[block] = -(logps.exp() * logps).sum(-1)
    return logprobs, entropy


def sample(
    hidden: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    softcap: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token from each row's distribution, (T,)."""
    target = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    for block in _blocks(hidden):
        probs = capped(torch.mm(hidden[block], weight.t()), softcap).softmax(-1)
        target[block] = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
    return target


def gradients(
    hidden: Tensor,  # (T, D)
    target: Tensor,  # (T,)
    weight: Tensor,  # (V, D)
    softcap: float | None,
    dlogprobs: Tensor,  # (T,)
) -> tuple[Tensor, Tensor]:
    """Return dhidden (T, D) and dweight (V, D); autograd derives what lies between the GEMMs."""
    dhidden, dweight = torch.empty_like(hidden), torch.zeros_like(weight)
    for block in _blocks(hidden):
        logits = torch.mm(hidden[block], weight.t()).requires_grad_()
        logps = capped(logits, softcap).log_softmax(-1).gather(-1, target[block, None])
        (dlogits,) = torch.autograd.grad(logps, logits, dlogprobs[block, None].to(logps))
        dhidden[block] = torch.mm(dlogits, weight)
        dweight.addmm_(dlogits.t(), hidden[block])
    return dhidden, dweight


def _blocks(rows: Tensor) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, len(rows), _BLOCK_ROWS))
