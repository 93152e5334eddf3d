"""Row kernels in plain torch: any device, any floating dtype, fp64 included."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    LEAST_LOGP,
    RowStats,
    Transform,
    concatenate,
    output_view,
    stats_dtype,
)

# One block of rows at a time keeps the fp32 temporaries of a 16-bit tile small.
BLOCK_ELEMENTS = 1 << 23


class TorchRows:
    """Implements :class:`grpo_kernels.backends.base.RowKernels`."""

    def stats(self, logits: Tensor, target: Tensor, transform: Transform, extras: bool) -> RowStats:
        return concatenate(
            [
                _stats(logits[block], target[block], transform.rows(block), extras)
                for block in row_blocks(logits, BLOCK_ELEMENTS)
            ]
        )

    def dlogits_(
        self,
        logits: Tensor,
        target: Tensor,
        transform: Transform,
        stats: RowStats,
        dlogp: Tensor,
        dentropy: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        out = output_view(logits, out_dtype)
        for block in row_blocks(logits, BLOCK_ELEMENTS):
            gradient = _dlogits(
                logits[block],
                target[block],
                transform.rows(block),
                stats.lse[block],
                stats.entropy[block],
                dlogp[block],
                dentropy[block] if dentropy is not None else None,
            )
            out[block] = gradient
        return out


TORCH_ROWS = TorchRows()


def row_blocks(logits: Tensor, elements: int) -> list[slice]:
    """Ranges of a power of two of rows, of about ``elements`` logits.

    A tile whose height is one, too, is cut evenly: how a library adds up a row may depend on how
    many rows it is given.
    """
    rows, columns = logits.shape
    step = 1 << (max(1, elements // max(columns, 1)).bit_length() - 1)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def transformed(logits: Tensor, transform: Transform) -> tuple[Tensor, Tensor | None]:
    """The scores of (C, V) logits in the statistics dtype, and tanh of the softcap if any."""
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
    """A (C, V) gradient by the scores turned, in place, into the one by the logits."""
    gradient *= _per_row(transform.logit_scale / transform.temperature)
    if tanh is not None:
        gradient *= 1 - tanh * tanh
    return gradient


def _per_row(value: float | Tensor) -> float | Tensor:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value


def _aligned(scores: Tensor) -> Tensor:
    """The same rows, lengthened by scores of -inf to a multiple of 32 columns.

    All rows then begin at the same alignment, by which a GPU's reductions group their terms.
    """
    return torch.nn.functional.pad(scores, (0, -scores.shape[1] % 32), value=float("-inf"))


def _stats(logits: Tensor, target: Tensor, transform: Transform, extras: bool) -> RowStats:
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
    total = exponentials.sum(-1)
    log_total = total.log()
    sum_sq = (exponentials * exponentials).sum(-1) / total**2 if extras else None
    # a logit of -inf has probability 0 and adds nothing: 0 * -inf would be NaN
    weighted = exponentials.mul_(shifted.clamp_(min=LEAST_LOGP))
    entropy = (log_total - weighted.sum(-1) / total).clamp(min=0)
    return RowStats(
        logp=shifted_target - log_total,
        entropy=entropy,
        lse=top.squeeze(-1).double() + log_total.double(),
        is_top1=is_top1,
        sum_sq_probs=sum_sq,
        max_logit=top.squeeze(-1) if extras else None,
        min_logit=lowest,
    )


def _dlogits(
    logits: Tensor,
    target: Tensor,
    transform: Transform,
    lse: Tensor,
    entropy: Tensor,
    dlogp: Tensor,
    dentropy: Tensor | None,
) -> Tensor:
    scores, tanh = transformed(logits, transform)
    anchor = lse.to(scores.dtype)
    logp = scores.sub_(anchor.unsqueeze(-1)).sub_((lse - anchor).to(scores.dtype).unsqueeze(-1))
    p = logp.exp()
    coefficient = -dlogp.unsqueeze(-1)
    if dentropy is not None:
        bounded = logp.clamp_(min=LEAST_LOGP)
        coefficient = coefficient - dentropy.unsqueeze(-1) * (bounded + entropy.unsqueeze(-1))
    gradient = p.mul_(coefficient)
    inside = (target >= 0) & (target < logits.shape[-1])  # else in another slice of the vocabulary
    gradient.scatter_add_(
        -1, (target * inside).unsqueeze(-1), torch.where(inside, dlogp, 0).unsqueeze(-1)
    )
    return slope(gradient, transform, tanh)
