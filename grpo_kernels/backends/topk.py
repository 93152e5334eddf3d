"""The first k tokens of a row by their scores, and the mean of these, read from a tile.

The larger score comes first, and of equal ones, which are common in 16 bits, the smaller index.
Torch ops run on a block of rows at a time, the same on every device and beside every backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_kernels.backends.base import BLOCK_ELEMENTS, RowStats, Tile, row_blocks, transformed
from grpo_kernels.head import VocabShard, stats_dtype

NOWHERE = -1  # the ids of a row that has no order
_INDEX_BITS = 32  # of a key; the rest is the score
_GROUP = 64  # columns
_CPU_ELEMENTS = 1 << 18  # of a block: its temporaries stay in the cache


def with_top_k(tile: Tile, stats: RowStats, k: int, shard: VocabShard | None = None) -> RowStats:
    """Return ``stats``, of whole rows, with the first ``k`` ids of each, over all ranks' shards."""
    candidates = []
    for block in _blocks_of_scores(tile):
        first = _top(block, min(k, block.shape[1]))
        candidates.append((block.gather(-1, first), first))
    scores, indices = (torch.cat(column) for column in zip(*candidates, strict=True))
    target = tile.target
    if shard is not None:
        target = target + shard.start
        scores, indices = _merged(scores, indices + shard.start, k, shard)
    logp = (scores.double() - stats.lse.unsqueeze(-1)).clamp(max=0).to(scores.dtype)
    return completed(stats, target, logp, indices)


def mean_logits(tile: Tile, shard: VocabShard | None = None) -> Tensor:
    """Return the (C,) means of a row's scores, over the whole vocabulary."""
    blocks = _blocks_of_scores(tile)
    sums = torch.cat([block.sum(-1, dtype=torch.float64) for block in blocks])
    counts = torch.full_like(sums, tile.logits.shape[1])
    if shard is not None:
        sums, counts = shard.gather(torch.stack([sums, counts])).sum(0)
    return (sums / counts).to(stats_dtype(tile.logits.dtype))


def completed(
    stats: RowStats, target: Tensor, topk_logprobs: Tensor, topk_indices: Tensor
) -> RowStats:
    """Return ``stats`` with these (C, k), and with an ``is_top1`` that agrees with them."""
    # no softmax exists with a NaN or +inf among a row's scores, or -inf alone
    lost = ~stats.lse.isfinite().unsqueeze(-1)
    topk_logprobs = topk_logprobs.masked_fill(lost, float("nan"))
    topk_indices = topk_indices.masked_fill(lost, NOWHERE)
    is_top1 = None if stats.is_top1 is None else topk_indices[:, 0] == target
    return stats._replace(is_top1=is_top1, topk_logprobs=topk_logprobs, topk_indices=topk_indices)


def _blocks_of_scores(tile: Tile) -> Iterator[Tensor]:
    """Yield the scores, block by block."""
    size = _CPU_ELEMENTS if tile.logits.device.type == "cpu" else BLOCK_ELEMENTS
    for rows in row_blocks(tile.logits, size):
        logits, _, transform = tile.rows(rows)
        yield transformed(logits, transform)[0]


def _merged(scores: Tensor, ids: Tensor, k: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return scores and ids (C, k) of the first of all ranks, from (C, up to k) of this one."""
    # ranks are in the order of ids, and so are equal scores within one: stable sorts leave them so
    missing = (0, k - ids.shape[1])
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(ids, missing, value=NOWHERE)
    scores, ids = (torch.cat(tuple(shard.gather(x)), -1) for x in (scores, ids))
    # of scores of -inf, too, those that are there come first
    order = (ids == NOWHERE).to(torch.int8).argsort(dim=-1, stable=True)
    scores = scores.gather(-1, order)
    ids = ids.gather(-1, order)
    first = scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return scores.gather(-1, first), ids.gather(-1, first)


def _top(scores: Tensor, k: int) -> Tensor:
    """Return the first ``k`` columns of each row in order, (C, k) int64."""
    # They lie in the first k groups of columns by their maxima: one cheap pass leaves few of them.
    columns = scores.shape[1]
    if columns <= 2 * k * _GROUP:
        return _first(scores, k)
    scores = torch.nn.functional.pad(scores, (0, -columns % _GROUP), value=float("-inf"))
    grouped = scores.unflatten(-1, (scores.shape[1] // _GROUP, _GROUP))
    groups = _first(grouped.amax(-1), k).sort(-1).values
    candidates = grouped.gather(1, groups.unsqueeze(-1).expand(-1, -1, _GROUP)).flatten(1)
    place = _first(candidates, k)
    return groups.gather(-1, place // _GROUP) * _GROUP + place % _GROUP


def _first(scores: Tensor, k: int) -> Tensor:
    """Do the same as :func:`_top`, with work for every score."""
    # ``topk`` leaves open which of equal values it takes, and in which order: it gets keys of which
    # no two are equal, a fp32 score's bits as an integer that rises with it, and then the index
    if scores.dtype == torch.float64:  # no room for an index
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes the 0.0 that it equals
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    index = torch.arange(scores.shape[1], device=scores.device)
    keys = order.long().mul_(2**_INDEX_BITS).sub_(index)
    return -keys.topk(k).values & (2**_INDEX_BITS - 1)
