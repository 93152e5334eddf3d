"""Log-probabilities by full rows of logits, a chunk of rows at a time.

In whatever dtype the inputs have: fp64 for the reference, fp32 for the problem's own inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_CHUNK_ROWS = 128


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def statistics(
    hidden: Tensor,  # (T, D)
    target: Tensor,  # (T,)
    weight: Tensor,  # (V, D)
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return (T,) log-probabilities and entropies; a backward forms the logits again."""

    def of_chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logps = softcapped(hidden @ weight.t(), softcap).log_softmax(-1)
        return logps.gather(-1, target[:, None]).squeeze(-1), -(logps.exp() * logps).sum(-1)

    chunks = zip(hidden.split(_CHUNK_ROWS), target.split(_CHUNK_ROWS), strict=True)
    found = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    logprobs, entropy = map(torch.cat, zip(*found, strict=True))
    return logprobs, entropy


def sample(
    hidden: Tensor,  # (T, D)
    weight: Tensor,  # (V, D)
    softcap: float | None,
    generator: torch.Generator,
) -> Tensor:
    """Sample a token from each row's distribution, (T,)."""
    found = []
    for chunk in hidden.split(_CHUNK_ROWS):
        probs = softcapped(chunk @ weight.t(), softcap).softmax(-1)
        found.append(torch.multinomial(probs, 1, generator=generator).squeeze(-1))
    return torch.cat(found)
