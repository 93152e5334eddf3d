"""A head whose vocabulary is split over ranks: which ids this one holds, and how to reach the rest.

Each rank has some consecutive rows of the (V, D) weight, and the same hidden states and targets. A
few numbers per row are gathered, then reduced in the order of the ranks: all have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.ranks import gather, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The ids that this rank's (V_r, D) weight holds; make it once, with :meth:`of`.

    It holds numbers and a name alone, so that it can go through ``torch.compile``.
    """

    group: str  # the name of the process group
    rank: int  # of this process, in the group
    rows: tuple[int, ...]  # of each rank's weight, padding included
    vocab_size: int  # V: ids from there on are padding, and have no probability

    @staticmethod
    def of(
        group: ProcessGroup | DeviceMesh, weight: Tensor, vocab_size: int | None = None
    ) -> VocabShard:
        """Describe a weight that is split by rows over ``group``, in the order of its ranks.

        All ranks of the group call it, once per head: they tell each other their sizes.

        Args:
            group: a process group, or a device mesh of one dimension.
            weight: (V_r, D), this rank's rows; their number may differ from rank to rank. Or a
                DTensor (V, D) with a mesh dimension of this group, whose shards they are.
            vocab_size: the ids that there really are, where the last rows are padding. None: all.

        Raises:
            ValueError: on every rank: the group is none of this process, the ranks disagree on D,
                on the dtype or on ``vocab_size``, or one holds nothing but padding.
        """
        group = process_group("group", group)
        if weight.dim() != 2:
            raise ValueError(f"weight: expected shape (V / n, D), got {tuple(weight.shape)}")
        rank, held = dist.get_rank(group), weight.shape[0]
        if hasattr(weight, "device_mesh"):  # as torch deals them out
            each = -(-held // dist.get_world_size(group))
            held = min(max(held - rank * each, 0), each)
        size = -1 if vocab_size is None else int(vocab_size)
        facts = {"D of weight": weight.shape[1], "bytes of weight's dtype": weight.dtype.itemsize}
        facts |= {"vocab_size": size, "rows": held}
        mine = torch.tensor(list(facts.values()), device=weight.device)
        *alike, rows = gather(mine, group).t().tolist()
        for name, found in zip(facts, alike, strict=False):
            if len(set(found)) > 1:
                raise ValueError(f"vocab_shard: expected ranks that agree on {name}, got {found}")
        total = sum(rows) if vocab_size is None else vocab_size
        empty = [i for i, held in enumerate(rows) if sum(rows[:i]) >= total or not held]
        if not 0 < total <= sum(rows) or empty:
            raise ValueError(
                f"vocab_size: expected ids on every rank, at most {sum(rows)} (rows of the weights "
                f"{rows}), got {total}"
            )
        name = group.group_name
        return VocabShard(group=name, rank=rank, rows=tuple(rows), vocab_size=total)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def start(self) -> int:
        """The first id of this rank."""
        return sum(self.rows[: self.rank])

    @property
    def columns(self) -> int:
        """The ids of this rank."""
        return min(self.start + self.rows[self.rank], self.vocab_size) - self.start

    @property
    def max_local_vocab(self) -> int:
        """The ids of the rank with the most: all ranks cut their rows alike, as it does."""
        return max(self.rows)

    def owns(self, columns: Tensor) -> Tensor:
        """Return which ids, counted from :attr:`start`, are this rank's; bool of the same shape."""
        return (columns >= 0) & (columns < self.columns)

    def gather(self, mine: Tensor) -> Tensor:
        """Return all ranks' tensors of one shape, (n, ...), in the order of the ranks."""
        return gather(mine, self._group)

    def start_sum(self, x: Tensor) -> Work:
        """Start to sum a contiguous tensor over the ranks, in place; ``wait()`` ends it."""
        return dist.all_reduce(x, group=self._group, async_op=True)

    @property
    def _group(self) -> ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.group)  # type: ignore[arg-type]
