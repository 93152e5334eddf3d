"""Row kernels in plain torch: any device, any floating dtype, fp64 included."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    LEAST_LOGP,
    RowStats,
    StatsGrad,
    Tile,
)
from grpo_kernels.head import Transform, stats_dtype

# One block of rows at a time keeps the fp32 temporaries of a 16-bit tile small.
BLOCK_ELEMENTS = 1 << 23


def row_blocks(logits: Tensor, elements: int) -> list[slice]:
    """Cut rows into ranges of a power of two, of about ``elements`` logits.

    A tile whose height is one, too, is cut evenly: how a library adds up a row may depend on how
    many rows it is given.
    """
    rows, columns = logits.shape
    step = 1 << (max(1, elements // max(columns, 1)).bit_length() - 1)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def transformed(logits: Tensor, transform: Transform) -> tuple[Tensor, Tensor | None]:
    """Return the scores of (C, V) logits in the statistics dtype, and the softcap's tanh if any."""
    scores = logits.to(stats_dtype(logits.dtype), copy=True)
    if transform.logit_scale != 1.0:
        scores *= transform.logit_scale
    tanh = None
    if transform.softcap is not None:
        tanh = scores.div_(transform.softcap).tanh_()
        scores = tanh * transform.softcap
    scores /= _per_row(transform.temperature)
    return scores, tanh


def slope(gradient: Tensor, transform: Transform, tanh: Tensor | None) -> Tensor:
    """Turn a (C, V) gradient by the scores into the one by the logits, in place."""
    gradient *= _per_row(transform.logit_scale / transform.temperature)
    if tanh is not None:
        gradient *= 1 - tanh * tanh
    return gradient


def _per_row(value: float | Tensor) -> float | Tensor:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def _aligned(scores: Tensor) -> Tensor:
    """Return the rows, padded with scores of -inf to a multiple of 32 columns.

    All rows then begin at the same alignment, by which a GPU's reductions group their terms.
    """
    return torch.nn.functional.pad(scores, (0, -scores.shape[1] % 32), value=float("-inf"))


def block_stats(tile: Tile, extras: bool) -> RowStats:
    """Compute the statistics of some rows at once."""
    logits, target, transform = tile
    scores, _ = transformed(logits, transform)  # (C, V)
    lowest = scores.amin(-1) if extras else None
    scores = _aligned(scores)
    top, first = (
        scores.max(-1, keepdim=True) if scores.numel() else (scores[:, :1], target[:, None])
    )
    is_top1 = first.squeeze(-1) == target if extras else None
    shifted = scores.sub_(top)
    shifted_target = shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    exponentials = shifted.exp()
    # 1 and a little more, where a row is nearly certain: fp32 has no digits for the little
    total = exponentials.sum(-1, dtype=torch.float64)
    log_total = total.log()
    sum_sq = (exponentials * exponentials).sum(-1) / total**2 if extras else None
    # a logit of -inf has probability 0 and adds nothing: 0 * -inf would be NaN
    weighted = exponentials.mul_(shifted.clamp_(min=LEAST_LOGP))
    entropy = (log_total - weighted.sum(-1) / total).clamp(min=0)
    wide = scores.dtype
    return RowStats(
        logp=(shifted_target - log_total).to(wide),
        entropy=entropy.to(wide),
        lse=top.squeeze(-1).double() + log_total,
        is_top1=is_top1,
        sum_sq_probs=sum_sq.to(wide) if sum_sq is not None else None,
        max_logit=top.squeeze(-1) if extras else None,
        min_logit=lowest,
    )


def block_dlogits(tile: Tile, stats: RowStats, outer: StatsGrad) -> Tensor:
    """Return the gradient of some rows by their raw logits."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    lse, anchor = stats.lse, stats.lse.to(scores.dtype)
    logp = scores.sub_(anchor.unsqueeze(-1)).sub_((lse - anchor).to(scores.dtype).unsqueeze(-1))
    inside = (target >= 0) & (target < logits.shape[-1])  # else in another slice of the vocabulary
    place = (target * inside).unsqueeze(-1)
    p = logp.exp()
    dlogp = torch.zeros_like(stats.logp) if outer.dlogp is None else outer.dlogp
    coefficient = -dlogp.unsqueeze(-1)
    of_target = -dlogp * torch.expm1(stats.logp)  # 1 - p, of which p near 1 has no digits
    if outer.dentropy is not None:
        bounded = logp.clamp_(min=LEAST_LOGP).add_(stats.entropy.unsqueeze(-1))
        coefficient = coefficient - outer.dentropy.unsqueeze(-1) * bounded
        own_bounded = bounded.gather(-1, place).squeeze(-1)
        of_target = of_target - outer.dentropy * stats.logp.exp() * own_bounded
    gradient = p.mul_(coefficient)
    of_target = torch.where(inside, of_target, gradient.gather(-1, place).squeeze(-1))
    gradient.scatter_(-1, place, of_target.unsqueeze(-1))
    active = outer.nonzero
    if active is not None:  # a product with 0 would not hide what is no number
        gradient.masked_fill_(~active.unsqueeze(-1), 0)
    return slope(gradient, transform, tanh)
