"""Heads of Megatron: the vocabulary in equal shares over ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_kernels.head import DividedGradient, VocabShard
from grpo_kernels.ranks import process_group


def vocab_shard_of(
    weight: Tensor, tp_group: Any, start: int | None = None, end: int | None = None
) -> VocabShard | None:
    """Return which ids the rows of a weight (V / n, D) are; None if one rank holds all.

    The n ranks of ``tp_group`` have as many each, so that none has to be asked. Where the host says
    ``start`` and ``end``, others are a ValueError, as is a group of other ranks.
    """
    group = process_group("tp_group", tp_group)
    rank, size, rows = dist.get_rank(group), dist.get_world_size(group), weight.shape[0]
    for name, value, expected in (
        ("vocab_start_index", start, rank * rows),
        ("vocab_end_index", end, (rank + 1) * rows),
    ):
        if value is not None and value != expected:
            raise ValueError(
                f"{name}: expected {expected} for rank {rank} of {size} with {rows} rows, "
                f"got {value}"
            )
    if size == 1:
        return None
    return VocabShard(
        group=group.group_name, rank=rank, rows=(rows,) * size, vocab_size=rows * size
    )


def with_share_of_gradient(x: Tensor, shard: VocabShard | None) -> Tensor:
    """Return ``x``, whose gradient is this rank's share of the whole, for hosts that sum shares."""
    return x if shard is None else DividedGradient.apply(x, shard.size)
