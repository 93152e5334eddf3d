"""The passes in plain torch: any device, any floating dtype, fp64 included.

The gradient of a row's log-probability by its raw logits is ``slope_v (1[v = y] - p_v)``: the share
of the target and V - 1 others, nearly all of them tiny. Sparse products with the *entries* that
matter can take the place of two GEMMs: the ones above a cut ``eps`` are kept as they are. One of
size ``a <= eps`` is kept with probability ``a / eps``, as ``eps``: what is kept is right in the
mean, and the expected squared error is the sum of ``a (eps - a)``. Each row has nearly the largest
cut for which that is within the error that it is allowed.

Whether an entry is kept follows from a hash of the row's key and its column: the same run gives the
same bits. Which rows are computed whole follows from expectations, so the mean stays right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import (
    LEAST_LOGP,
    WHOLE,
    Backend,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    concatenate,
    output_view,
)
from grpo_kernels.head import Transform, stats_dtype

# One block of rows at a time keeps the fp32 temporaries of a 16-bit tile small.
BLOCK_ELEMENTS = 1 << 23
_ENTRIES_BLOCK = 1 << 20  # elements of a block: some twenty fp64 temporaries
# Of the search for a row's cut, in every backend: how many cuts it tries, with what share of the
# row's sizes it starts, and the least root of an error's ratio by which it moves a cut.
READS, START, LEAST_POWER = 2, 0.01, 0.125
_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
_TINY = 1e-300


class Chunked(Backend):
    """Rows block by block, in torch ops."""

    name = "chunked"

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        blocks = row_blocks(tile.logits, BLOCK_ELEMENTS)
        return concatenate([_block_stats(tile.rows(block), extras) for block in blocks])

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGrad,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        out = output_view(tile.logits, out_dtype) if out is None else out
        for block in row_blocks(tile.logits, BLOCK_ELEMENTS):
            out[block] = _block_dlogits(tile.rows(block), stats.rows(block), outer.rows(block))
        return out

    def extract_entries(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        parts = [
            _block_entries(tile.rows(block), stats.rows(block), keys[block], allowed[block], slots)
            for block in row_blocks(tile.logits, _ENTRIES_BLOCK)
        ]
        return Entries.joined(parts)

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        rows, ids, values = _listed(entries, factor)
        used, ids = ids.unique(return_inverse=True)
        product = _grouped_sums(rows, len(factor), ids, values, matrix[used])
        kept = entries.used >= 0
        out[kept] = product[kept].to(out.dtype)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        places, ids, values = _listed(entries, factor)
        order = ids.argsort(stable=True)
        used, ids = ids[order].unique_consecutive(return_inverse=True)
        product = _grouped_sums(ids, len(used), places[order], values[order], rows)
        if not add:
            out.zero_()
        out[used] = (out[used] + product).to(out.dtype)


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


def _block_stats(tile: Tile, extras: bool) -> RowStats:
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


def _block_dlogits(tile: Tile, stats: RowStats, outer: StatsGrad) -> Tensor:
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


def row_keys(seed: int, lse: Tensor, first: int = 0) -> Tensor:
    """Return (C,) int32 keys of consecutive rows, the ``first`` of them given, with these fp64 lse.

    They differ from step to step as the policy does, from row to row also where rows are alike, and
    not from run to run.
    """
    bits = lse.double().contiguous().view(torch.int64)
    row = torch.arange(first, first + lse.numel(), device=lse.device)
    key = _mixed(row * GOLDEN + seed)
    key = _mixed(key ^ (bits & _MASK))
    key = _mixed(key ^ (bits >> 32 & _MASK))
    return torch.where(key < 1 << 31, key, key - (1 << 32)).int()


def _mixed(x: Tensor) -> Tensor:
    """Return a 32-bit hash of the low 32 bits (the end of MurmurHash3), in int64."""
    x = x & _MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


def _uniforms(keys: Tensor, columns: int) -> Tensor:
    """Return (C, V) fp64 numbers in (0, 1), multiples of 2^-25: those that decide what is kept."""
    column = torch.arange(columns, device=keys.device)
    hashed = _mixed(keys.long()[:, None] + column * GOLDEN)
    return ((hashed >> 8).double() + 0.5) * 2.0**-24


def _listed(entries: Entries, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of each entry, row by row."""
    meant = torch.arange(entries.columns, device=factor.device) < entries.used[:, None]
    rows = meant.nonzero()[:, 0]
    return rows, entries.ids[meant].long(), entries.values[meant] * factor[rows]


def _grouped_sums(
    groups: Tensor, count: int, places: Tensor, values: Tensor, matrix: Tensor
) -> Tensor:
    """Return (count, N) sums of ``values * matrix[places]``, for ascending ``groups``."""
    starts = torch.searchsorted(groups, torch.arange(count + 1, device=groups.device))
    return torch.nn.functional.embedding_bag(
        places,
        matrix.to(values.dtype),
        starts,
        mode="sum",
        per_sample_weights=values,
        include_last_offset=True,
    )


def _block_entries(
    tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
) -> Entries:
    """Choose the entries of some rows at once; see ``Backend.extract_entries``."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    here = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    finite = stats.lse.isfinite()
    p = torch.where(finite[:, None], (scores.double() - stats.lse[:, None]).exp(), 0.0)
    others = torch.where(here, 0.0, p)
    total = at_target = others.sum(1)  # 1 - p
    if tanh is not None:
        curve = torch.where(finite[:, None], 1 - tanh.double() ** 2, 0.0)
        others = others * curve
        at_target = at_target * curve.gather(1, target[:, None]).squeeze(1)
    scale = torch.as_tensor(transform.logit_scale / transform.temperature).to(others)
    norm = (at_target**2 + (others * others).sum(1)).sqrt()
    eps = _cuts(others, total, (allowed.double() / scale) ** 2)[:, None]
    large = others > eps
    drawn = torch.where(large, 0.0, others).sum(1) / eps[:, 0].clamp(min=_TINY)
    expected = 1 + large.sum(1) + drawn + 4 * drawn.sqrt()
    survives = _uniforms(keys, logits.shape[1]) * eps < others
    kept = torch.where(large, others, torch.where(survives, eps, 0.0))
    count = (kept > 0).sum(1) + 1
    fits = finite & (expected <= slots) & (count <= slots)
    count = torch.where(fits, count, WHOLE).int()
    error = kept - others
    ids, values = _packed(kept, at_target, target, count, slots)
    found = (*(torch.where(fits, x, 0.0) for x in (error.norm(dim=1), error.abs().sum(1))), norm)
    dtype = stats.logp.dtype
    return Entries(
        ids,
        (values.t() * scale).t().to(dtype).contiguous(),
        count,
        *((x * scale).to(dtype) for x in found),
    )


def _cuts(sizes: Tensor, total: Tensor, allowed: Tensor) -> Tensor:
    """Return cuts (C,), nearly the largest whose expected sums of squared errors are ``allowed``.

    An error is convex in the cut, and 0 at 0: where it is too large by a factor, the cut over that
    factor is within. The next cut to try is where the error would be what is allowed, were it the
    power of the cut that it is like here.

    Args:
        total: (C,) what the sizes add up to, at most.
    """
    least = allowed / total.clamp(min=1e-30)
    # above half of the total there is one size at most; drawing it saves nothing unless all may go
    most = torch.maximum(2 * least, total / 2)
    cut, safe = (least * (least + START * total)).sqrt(), torch.zeros_like(least)
    for _ in range(READS):
        below = torch.where(sizes <= cut[:, None], sizes, 0.0)
        slope = below.sum(1)
        error = cut * slope - below.square().sum(1)
        ratio = allowed / error.clamp(min=_TINY)
        safe = torch.maximum(safe, cut * ratio.clamp(max=1))
        power = (error / (cut * slope).clamp(min=_TINY)).clamp(min=LEAST_POWER)
        cut = (cut * ratio**power).clamp(safe, most)
    return safe


def _packed(
    kept: Tensor, at_target: Tensor, target: Tensor, count: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    """Return ids and values of what is kept, in the order of :class:`Entries`."""
    ids = target.new_zeros((len(count), slots), dtype=torch.int32)
    values = kept.new_zeros((len(count), slots))
    meant = (kept > 0) & (count > 0)[:, None]
    rows, columns = torch.nonzero(meant, as_tuple=True)
    place = meant.cumsum(1)[rows, columns]  # from 1: the target is at 0
    ids[rows, place], values[rows, place] = columns.int(), -kept[rows, columns]
    ids[:, 0], values[:, 0] = target.int(), at_target
    return ids, values
