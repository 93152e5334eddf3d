"""Heads of Megatron: the vocabulary in equal shares over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.head import VocabShard
from grpo_kernels.ranks import process_group


def vocab_shard_of(
    weight: Tensor, tp_group: Any, start: int | None = None, end: int | None = None
) -> VocabShard | None:
    """Return which ids a weight (V / n, D) holds; None if one rank holds all.

    All ranks have as many, so that none has to be asked.

    Args:
        weight: this rank's rows.
        tp_group: the n ranks that share the vocabulary.
        start, end: the ids that a host takes them for, which is checked; None: it does not say.

    Raises:
        ValueError: these are not the ids of equal shares, or the group is none of this rank.
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
    shares = (rows,) * size
    return VocabShard(group=group.group_name, rank=rank, rows=shares, vocab_size=sum(shares))


def with_share_of_gradient(x: Tensor, shard: VocabShard | None) -> Tensor:
    """Return ``x``, whose gradient is this rank's share of the whole, for hosts that sum shares."""
    if shard is None or not torch.is_grad_enabled() or not x.requires_grad:
        return x
    shared = x.view_as(x)
    shared.register_hook(lambda dx: dx / shard.size)
    return shared
