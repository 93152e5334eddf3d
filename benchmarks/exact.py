"""Log-probabilities and gradients by full rows of logits, a chunk of rows at a time.

In whatever dtype the inputs have: fp64 for the reference, fp32 for the problem's own inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK_ROWS = 128


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def statistics(
    hidden: Tensor,  # (T, D)
    target: Tensor,  # (T,)
    weight: Tensor,  # (V, D)
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (T,) log-probabilities and entropies."""
    logprobs, entropy = hidden.new_empty(len(hidden)), hidden.new_empty(len(hidden))
    for chunk in _chunks(hidden):
        logps = softcapped(torch.mm(hidden[chunk], weight.t()), softcap).log_softmax(-1)
        logprobs[chunk] = logps.gather(-1, target[chunk, None]).squeeze(-1)
        entropy[chunk] = -(logps.exp() * logps).sum(-1)
    return logprobs, entropy


def sample(
    hidden: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    softcap: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token from each row's distribution, (T,)."""
    target = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    for chunk in _chunks(hidden):
        probs = softcapped(torch.mm(hidden[chunk], weight.t()), softcap).softmax(-1)
        target[chunk] = torch.multinomial(probs, 1, generator=generator).squeeze(-1)
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
    for chunk in _chunks(hidden):
        logits = torch.mm(hidden[chunk], weight.t()).requires_grad_()
        logps = softcapped(logits, softcap).log_softmax(-1).gather(-1, target[chunk, None])
        (dlogits,) = torch.autograd.grad(logps, logits, dlogprobs[chunk, None].to(logps))
        dhidden[chunk] = torch.mm(dlogits, weight)
        dweight.addmm_(dlogits.t(), hidden[chunk])
    return dhidden, dweight


def _chunks(rows: Tensor) -> Iterator[slice]:
    return (slice(start, start + _CHUNK_ROWS) for start in range(0, len(rows), _CHUNK_ROWS))
