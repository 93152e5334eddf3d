"""Next-token distributions like those of a policy in RL, before a head of real shape.

Most tokens are all but decided, a fifth is not and carries the entropy (arXiv:2506.01939), and the
targets are drawn from the distributions themselves, so that a rare one is there as often as it
should be.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from benchmarks.exact import sample, statistics
from benchmarks.shapes import DTYPES, Model

_SEED = 7
_ROW_NORM = 2.0  # of the head's rows: hidden states of deviation s give logits of deviation 2 s
_FAVOURITES = 2  # rows of the head that a hidden state points at
_DECIDED = 0.8  # of the tokens
# Deviation of the logits, as a part of the one at which a single token takes all of the mass. The
# entropy of normal logits is log V - deviation^2 / 2 up to there (Derrida 1981).
_SPREADS = {True: (0.45, 0.75), False: (0.83, 0.97)}
# Log-odds of the first favourite against all that is not one, and how far the next one is behind.
_ODDS = {True: (4.0, 13.0), False: (-2.0, 1.0)}
_BEHIND = {True: (2.0, 10.0), False: (0.0, 2.0)}


def make_policy(
    model: Model, sequences: int, length: int, dtype: str, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states (B, L, D), a head (V, D), targets and log-probabilities (B, L)."""
    generator = torch.Generator(device).manual_seed(_SEED)
    weight = torch.empty(model.vocabulary, model.hidden, device=device)
    weight.normal_(std=_ROW_NORM / model.hidden**0.5, generator=generator)
    hidden = _hidden(sequences * length, model, weight, generator).to(DTYPES[dtype])
    weight = weight.to(DTYPES[dtype])
    wide = hidden.double(), weight.double()
    target = sample(*wide, model.softcap, generator)
    logprobs = statistics(wide[0], target, wide[1], model.softcap)[0].float()
    shape = sequences, length
    return hidden.view(*shape, -1), weight, target.view(shape), logprobs.view(shape)


def _hidden(tokens: int, model: Model, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Return (T, D) fp32 states: noise plus each favourite's row of the head, by its odds."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=weight.device)

    decided = draw(tokens) < _DECIDED
    critical = math.sqrt(2 * math.log(model.vocabulary))
    spread = critical * _between(_SPREADS, decided, draw(tokens))
    noise = torch.empty(tokens, model.hidden, device=weight.device)
    noise.normal_(generator=generator).mul_(spread[:, None] / _ROW_NORM)
    rows = torch.randint(
        model.vocabulary, (tokens, _FAVOURITES), generator=generator, device=weight.device
    )
    behind = _between(_BEHIND, decided, draw(tokens))[:, None]
    steps = torch.arange(_FAVOURITES, device=weight.device)
    odds = _between(_ODDS, decided, draw(tokens))[:, None] - behind * steps
    favourites = weight[rows]  # (T, favourites, D)
    present = torch.einsum("td,tkd->tk", noise, favourites)
    # the others are normal: that is the logarithm of their summed exponentials
    wanted = (math.log(model.vocabulary) + spread.square() / 2)[:, None] + odds
    strength = (wanted - present) / _ROW_NORM**2
    return noise + torch.einsum("tk,tkd->td", strength, favourites)


def _between(ranges: dict[bool, tuple[float, float]], decided: Tensor, share: Tensor) -> Tensor:
    """Return (T,) values ``share`` of the way through the range of decided or of open tokens."""
    low, high = (torch.where(decided, ranges[True][end], ranges[False][end]) for end in (0, 1))
    return low + share * (high - low)
