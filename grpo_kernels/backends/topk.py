"""Ranks and top-k of tokens among the scores of their row, read from a tile of logits.

One total order serves all: the larger score first, and of equal ones the smaller index. Equal
scores are common: logits rounded to 16 bits collide, and a softcap's tanh saturates. It runs as
torch ops on a block of rows at a time, the same on every device and beside every backend's row
kernels: a few passes over the tile, only for those who ask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile, Wanted, concatenate
from grpo_kernels.backends.chunked import BLOCK_ELEMENTS, row_blocks, transformed
from grpo_kernels.head import stats_dtype

NOWHERE = -1  # the rank and the ids of a row that has no order
_INDEX_BITS = 32  # of a key; the rest is the score
_GROUP = 64  # columns
_CPU_ELEMENTS = 1 << 18  # of a block: its temporaries stay in the cache


def with_ranks(tile: Tile, stats: RowStats, wanted: Wanted) -> RowStats:
    """Return ``stats`` with the target's rank and the first k columns, where they are wanted."""
    ids, parts = _ids(tile.logits), []
    for rows in row_blocks(tile.logits, _block_elements(tile.logits.device)):
        parts.append(_ranked(tile.rows(rows), stats.rows(rows), wanted, ids))
    return concatenate(parts)


def _ranked(tile: Tile, stats: RowStats, wanted: Wanted, ids: Tensor) -> RowStats:
    scores, _ = transformed(tile.logits, tile.transform)
    rank = _rank(scores, tile.target, ids) if wanted.rank else None
    if not wanted.top_k:
        return completed(stats, tile.target, rank)
    indices = _top(scores, wanted.top_k)
    logp = scores.gather(-1, indices).double() - stats.lse.unsqueeze(-1)
    return completed(stats, tile.target, rank, logp.clamp(max=0).to(scores.dtype), indices)


def completed(
    stats: RowStats,
    target: Tensor,  # (C,)
    rank: Tensor | None,  # (C,)
    topk_logp: Tensor | None = None,  # (C, k), as the next
    topk_indices: Tensor | None = None,
) -> RowStats:
    """Return ``stats`` with these, and with an ``is_top1`` that agrees with them.

    Where no softmax exists, with a NaN or +inf among a row's scores or -inf alone, ids are -1.
    """
    lost = ~stats.lse.isfinite()
    if rank is not None:
        rank = rank.masked_fill(lost, NOWHERE)
        stats = stats._replace(rank=rank)
    if topk_logp is not None and topk_indices is not None:
        topk_logp = topk_logp.masked_fill(lost.unsqueeze(-1), float("nan"))
        topk_indices = topk_indices.masked_fill(lost.unsqueeze(-1), NOWHERE)
        stats = stats._replace(topk_logp=topk_logp, topk_indices=topk_indices)
    if stats.is_top1 is not None:
        first = rank == 0 if rank is not None else topk_indices[:, 0] == target  # type: ignore[index]
        stats = stats._replace(is_top1=first)
    return stats


def _block_elements(device: torch.device) -> int:
    return _CPU_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS


def _ids(logits: Tensor) -> Tensor:
    """Return the (V,) column ids, as floats that also count them exactly.

    In and into floats, torch on a CPU compares several times as fast as integers or into booleans.
    """
    columns = logits.shape[1]
    dtype = stats_dtype(logits.dtype) if columns <= 2**24 else torch.float64
    return torch.arange(columns, dtype=dtype, device=logits.device)


def _rank(scores: Tensor, target: Tensor, ids: Tensor) -> Tensor:
    """Return (C,) int64 ranks: how many scores of a row come before the target's."""
    target = target.unsqueeze(-1)
    own = scores.gather(-1, target)
    larger, equal, smaller_id = (torch.empty_like(scores) for _ in range(3))
    torch.gt(scores, own, out=larger)
    torch.eq(scores, own, out=equal)
    torch.lt(ids, target.to(ids.dtype), out=smaller_id)
    return larger.addcmul_(equal, smaller_id).sum(-1, dtype=ids.dtype).long()


def _top(scores: Tensor, k: int) -> Tensor:
    """Return the first ``k`` columns of each row in order, (C, k) int64.

    They lie in the first ``k`` groups of columns, which stand in the order of their maxima: before
    any other group there are ``k`` scores. So one cheap pass leaves few candidates.
    """
    rows, columns = scores.shape
    if columns <= 2 * k * _GROUP:
        return _first(scores, k)
    scores = torch.nn.functional.pad(scores, (0, -columns % _GROUP), value=float("-inf"))
    grouped = scores.view(rows, -1, _GROUP)
    groups = _first(grouped.amax(-1), k).sort(-1).values
    candidates = grouped.gather(1, groups.unsqueeze(-1).expand(-1, -1, _GROUP)).view(rows, -1)
    place = _first(candidates, k)
    return groups.gather(-1, place // _GROUP) * _GROUP + place % _GROUP


def _first(scores: Tensor, k: int) -> Tensor:
    """Do the same as :func:`_top`, with work for every score.

    ``topk`` leaves open which of equal values it takes, and in which order: it gets keys of which
    no two are equal. An fp64 score leaves no room in a key, and is sorted with its row.
    """
    if scores.dtype == torch.float64:
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return -_keys(scores).topk(k).values & (2**_INDEX_BITS - 1)


def _keys(scores: Tensor) -> Tensor:
    """Return (C, V) int64 keys ``2**32 * order - index``; ``order`` is the fp32 score's bits as an
    integer that rises with it."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes the 0.0 that it equals
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    index = torch.arange(scores.shape[1], device=scores.device)
    return order.long().mul_(2**_INDEX_BITS).sub_(index)
