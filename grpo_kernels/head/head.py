"""What makes logits: a linear head or its shard, a low-rank adapter, the transform to scores.

LoRA on the head (Hu et al., arXiv:2106.09685): ``W + s B A`` is never formed. With ``U = s X A^T``
(C, r), the logits are ``X W^T + U B^T``, summed in fp32. Of the gradients, ``dU = dlogits B`` and
``dB = dlogits^T U`` walk over the vocabulary; ``dX += s dU A`` and ``dA = s dU^T X`` are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.common import gather, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work
    from torch.distributed.device_mesh import DeviceMesh


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, losses and metrics: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def logits_dtype(dtype: torch.dtype, precision: str) -> torch.dtype:
    """Return the dtype that logits are stored in: never 16 bits for ``precision="fp32"``."""
    return dtype if precision == "input" or dtype == torch.float64 else torch.float32


def emptied(x: Tensor) -> Tensor:
    """Return a tensor of no rows that, unlike a slice, does not share the memory of ``x``."""
    return x.new_empty((0, *x.shape[1:]))


@dataclass(frozen=True)
class Transform:
    """Logits to the distribution's scores: ``z = softcap * tanh(scale * logit / softcap) / T``.

    Without ``softcap``, ``z = scale * logit / T``. ``temperature`` is a float, or a ``(C,)`` tensor
    of the statistics dtype with one value per row.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def rows(self, index: slice | Tensor) -> Transform:
        """Return the same transform for a subset of rows."""
        own = self.temperature
        return replace(self, temperature=own[index]) if isinstance(own, Tensor) else self


@dataclass(frozen=True, kw_only=True)
class HeadLoRA:
    """An adapter of a linear head: ``logits = X W^T + scaling * (X A^T) B^T``.

    The factors may be of any floating dtype, whatever that of the head; they are not rounded to the
    head's in the forward, under autocast neither. Gradients flow to both.
    """

    a: Tensor  # (r, D)
    b: Tensor  # (V, r)
    scaling: float = 1.0

    @staticmethod
    def joined(adapters: Sequence[HeadLoRA]) -> HeadLoRA | None:
        """Return one adapter that is the sum of all, differentiable in each; None for none."""
        if len(adapters) < 2:
            return adapters[0] if adapters else None
        dtypes = (x.dtype for one in adapters for x in (one.a, one.b))
        wide = reduce(torch.promote_types, dtypes, torch.float32)
        return HeadLoRA(
            a=torch.cat([one.a.to(wide) for one in adapters]),
            b=torch.cat([one.b.to(wide) * one.scaling for one in adapters], 1),
        )

    @property
    def rank(self) -> int:
        """The rank r of the factors."""
        return self.a.shape[0]

    def wide(self, dtype: torch.dtype) -> HeadLoRA:
        """Return the same in the dtype for GEMMs with hidden states of ``dtype``: fp32, or fp64."""
        wide = stats_dtype(dtype)
        return replace(self, a=self.a.to(wide), b=self.b.to(wide))

    def columns(self, index: slice) -> HeadLoRA:
        """Return the same for a range of the vocabulary."""
        return replace(self, b=self.b[index])

    def project_down(self, hidden: Tensor) -> Tensor:
        """Return ``U = s X A^T`` (C, r) of hidden states (C, D); the factors are wide."""
        rows = hidden.to(self.a.dtype)
        # with out=, which autocast leaves alone
        out = self.a.new_empty(hidden.shape[0], self.rank)
        return torch.mm(rows, self.a.t(), out=out).mul_(self.scaling)


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The ids that this rank's (V_r, D) weight holds; make it once, with :meth:`of`.

    All ranks have the same hidden states and targets, and exchange a few numbers per row: gathered,
    then reduced in the order of the ranks, so that all have the same bits. It holds numbers and a
    name alone, so that it can go through ``torch.compile``.
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
        rank = dist.get_rank(group)
        held = weight.shape[0]
        if hasattr(weight, "device_mesh"):  # as torch deals them out
            each = -(-held // dist.get_world_size(group))
            held = min(max(held - rank * each, 0), each)
        size = -1 if vocab_size is None else int(vocab_size)
        facts = {"D of weight": weight.shape[1], "bytes of weight's dtype": weight.dtype.itemsize}
        facts |= {"vocab_size": size, "rows": held}
        mine = torch.tensor(list(facts.values()), device=weight.device)
        *alike, rows = gather(mine, group).t().tolist()
        for name, values in zip(facts, alike, strict=False):
            if len(set(values)) > 1:
                raise ValueError(f"vocab_shard: expected ranks that agree on {name}, got {values}")
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


@dataclass(frozen=True)
class Head:
    """A linear head: ``logits = hidden @ weight.T + bias``, an update by LoRA, then the transform.

    ``weight`` may be fp32 under 16-bit hidden states (autocast); it is then multiplied in the
    dtype of the hidden states and still gets an fp32 gradient.
    """

    weight: Tensor  # (V, D)
    bias: Tensor | None = None  # (V,)
    transform: Transform = field(default_factory=Transform)  # torch 2.10 compiles no object
    lora: HeadLoRA | None = None
    shard: VocabShard | None = None  # which ids these are; None: all

    @property
    def vocab_size(self) -> int:
        """V, of all ranks that share the vocabulary."""
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """What may get a gradient: weight, bias, and A and B of the adapter."""
        factors = (None, None) if self.lora is None else (self.lora.a, self.lora.b)
        return (self.weight, self.bias, *factors)

    def with_tensors(
        self,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
    ) -> Head:
        """Return the same head with these in place of :attr:`tensors`."""
        lora = self.lora
        if lora is not None and lora_a is not None and lora_b is not None:
            lora = replace(lora, a=lora_a, b=lora_b)
        return replace(self, weight=weight, bias=bias, lora=lora)

    def without_tensors(self) -> Head:
        """Return the same head with empty :attr:`tensors`, which keeps none of their memory."""
        weight, *others = self.tensors
        return self.with_tensors(emptied(weight), *(x if x is None else emptied(x) for x in others))

    def rows(self, index: slice | Tensor) -> Head:
        """Return the same head for a subset of rows."""
        return replace(self, transform=self.transform.rows(index))

    def columns(self, index: slice) -> Head:
        """Return the same head for a range of its ids."""
        bias = None if self.bias is None else self.bias[index]
        lora = None if self.lora is None else self.lora.columns(index)
        return replace(self, weight=self.weight[index], bias=bias, lora=lora)

    def to(self, dtype: torch.dtype) -> Head:
        """Return the same head, ready for GEMMs with hidden states of ``dtype``."""
        lora = None if self.lora is None else self.lora.wide(dtype)
        return replace(self, weight=self.weight.to(dtype), lora=lora)
