"""Groups of ranks as callers give them, and what ranks tell each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def process_group(name: str, group: Any) -> ProcessGroup:
    """Return the process group of the argument ``name``: a group, or a mesh of one dimension."""
    available = dist.is_available()
    if available and isinstance(group, dist.ProcessGroup):
        return group
    mesh = available and isinstance(group, dist.DeviceMesh)
    if mesh and group.ndim == 1:
        return group.get_group()
    got = f"a mesh of {group.ndim} dimensions" if mesh else repr(group)
    if available and group is dist.GroupMember.NON_GROUP_MEMBER:
        got = "one that it is not in"
    raise ValueError(
        f"{name}: expected a process group of this rank, or a device mesh of one dimension, "
        f"got {got}"
    )


def gather(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks, or processes, in their order: of one shape, (n, ...)."""
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.all_gather(list(everyone), mine.contiguous(), group=group)
    return everyone
