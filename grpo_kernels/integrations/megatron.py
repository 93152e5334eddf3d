"""Megatron's heads, where each rank has an equal share of the vocabulary."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from grpo_kernels.common import process_group
from grpo_kernels.head import DividedGradient, VocabShard


def vocab_shard_of(
    weight: Tensor, tp_group: Any, start: int | None = None, end: int | None = None
) -> VocabShard | None:
    """Return the shard of a weight (V / n, D); None if one rank has the whole vocabulary.

    Each of the n ranks of ``tp_group`` has the same number of rows.

    Raises:
        ValueError: the trainer's ``start`` or ``end`` differs from that, or this rank is not in the
            group.
    """
    group = process_group("tp_group", tp_group)
    rank = dist.get_rank(group)
    size = dist.get_world_size(group)
    rows = weight.shape[0]
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
    """Return ``x``; its gradient is this rank's share, for trainers that sum over ranks."""
    return x if shard is None else DividedGradient.apply(x, shard.size)
