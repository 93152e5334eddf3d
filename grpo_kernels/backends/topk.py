"""The k ids with the largest scores of a row, and the mean of its scores, from a tile of logits.

Larger scores come first; ties, which are common in 16 bits, are in the order of the ids. Torch ops
run on a block of rows at a time, and are the same for every device and backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from grpo_kernels.backends.base import BLOCK_ELEMENTS, RowStats, Tile, row_blocks, transformed
from grpo_kernels.head import VocabShard, stats_dtype

NOWHERE = -1  # the ids of a row without an order
_INDEX_BITS = 32  # of a key; the other bits are the score
_GROUP = 64  # columns
_CPU_ELEMENTS = 1 << 18  # elements of a block, so that temporaries stay in the cache


def with_top_k(tile: Tile, stats: RowStats, k: int, shard: VocabShard | None = None) -> RowStats:
    """Return ``stats`` of whole rows with the first ``k`` ids of each row, over all shards."""
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
    """Return ``stats`` with these (C, k) tensors, and with an ``is_top1`` that agrees with them."""
    # there is no softmax if a score is NaN or +inf, or all are -inf
    lost = ~stats.lse.isfinite().unsqueeze(-1)
    topk_logprobs = topk_logprobs.masked_fill(lost, float("nan"))
    topk_indices = topk_indices.masked_fill(lost, NOWHERE)
    is_top1 = None if stats.is_top1 is None else topk_indices[:, 0] == target
    return stats._replace(is_top1=is_top1, topk_logprobs=topk_logprobs, topk_indices=topk_indices)


def _blocks_of_scores(tile: Tile) -> Iterator[Tensor]:
    """Yield the scores, one block of rows at a time."""
    size = _CPU_ELEMENTS if tile.logits.device.type == "cpu" else BLOCK_ELEMENTS
    for rows in row_blocks(tile.logits, size):
        logits, _, transform = tile.rows(rows)
        yield transformed(logits, transform)[0]


def _merged(scores: Tensor, ids: Tensor, k: int, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return scores and ids (C, k) over all ranks, from this rank's (C, up to k)."""
    # ranks are in the order of ids, and so are ties within a rank: stable sorts keep that order
    missing = (0, k - ids.shape[1])
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf)
    ids = torch.nn.functional.pad(ids, missing, value=NOWHERE)
    scores, ids = (torch.cat(tuple(shard.gather(x)), -1) for x in (scores, ids))
    # padding comes last, even after scores of -inf
    order = (ids == NOWHERE).to(torch.int8).argsort(dim=-1, stable=True)
    scores = scores.gather(-1, order)
    ids = ids.gather(-1, order)
    first = scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    return scores.gather(-1, first), ids.gather(-1, first)


def _top(scores: Tensor, k: int) -> Tensor:
    """Return the first ``k`` columns of each row in order, (C, k) int64."""
    # They are in the first k groups of columns by maximum: one cheap pass leaves few candidates.
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
    # ``topk`` does not define the choice and order of ties, so it gets unique keys: the bits of an
    # fp32 score as an integer that increases with it, then the index
    if scores.dtype == torch.float64:  # no room for the index
        return scores.argsort(dim=-1, descending=True, stable=True)[:, :k]
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    index = torch.arange(scores.shape[1], device=scores.device)
    keys = order.long().mul_(2**_INDEX_BITS).sub_(index)
    return -keys.topk(k).values & (2**_INDEX_BITS - 1)
