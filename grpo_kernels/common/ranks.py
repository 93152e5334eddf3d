"""Process groups from callers, and gathering tensors over their ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def process_group(name: str, group: Any) -> ProcessGroup:
    """Return the process group of the argument ``name``: a group, or a one-dimensional mesh."""
    available = dist.is_available()
    if available and isinstance(group, dist.ProcessGroup):
        return group
    mesh = available and isinstance(group, dist.DeviceMesh)
    if mesh and group.ndim == 1:
        return group.get_group()
    got = f"a mesh of {group.ndim} dimensions" if mesh else repr(group)
    if available and group is dist.GroupMember.NON_GROUP_MEMBER:
        got = "a group without this rank"
    raise ValueError(
        f"{name}: expected a process group with this rank, or a one-dimensional device mesh, "
        f"got {got}"
    )


def gather(mine: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return the tensors of all ranks (None: all processes), in order; all of one shape."""
    everyone = mine.new_empty((dist.get_world_size(group), *mine.shape))
    dist.all_gather(list(everyone), mine.contiguous(), group=group)
    return everyone
