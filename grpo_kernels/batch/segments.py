"""Reductions over the sequences of a packed batch, whose tokens may lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from grpo_kernels.batch import host
from grpo_kernels.batch.packing import SCALAR_FIELDS, TOKEN_FIELDS, UNKNOWN
from grpo_kernels.ranks import gather, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Segments:
    """Sums and means over sequences, in plain torch; a backend may bring its own.

    Where tokens lie on several ranks, all of these are of whole sequences: collectives, as are
    their derivatives.
    """

    cu_seqlens: Tensor  # (B + 1,) int64, from 0 to T
    total: int  # T
    across: SequenceGroup | None = None  # the ranks; None: this one alone

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each sequence."""
        return self.cu_seqlens.diff() if self.across is None else self.across.on_device[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.total if self.across is None else self.across.num_tokens

    def sum(self, values: Tensor) -> Tensor:
        """Sum (T,) values over each sequence, (B,), in fp64 and in token order: as in any batch."""
        wide, lengths = values.double(), self.cu_seqlens.diff()
        sums = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True, initial=0)
        if self.across is not None:
            sums = _GroupSum.apply(sums, self.across.group)
        return sums.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Average (T,) values over each sequence, (B,); 0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum (T,) values over all sequences, ()."""
        if self.across is None:
            return values.sum()
        total = values.sum(dtype=torch.float64).reshape(1)
        return _GroupSum.apply(total, self.across.group).reshape(()).to(values.dtype)

    def expand(self, values: Tensor) -> Tensor:
        """Give each token its sequence's value: (B,) to (T,)."""
        return values[torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)]

    def narrow(self, start: int, stop: int) -> Segments:
        """Return the same for tokens start..stop; a cut sequence keeps what lies inside."""
        if self.across is not None:
            raise ValueError("sequence_group: expected None to cut a batch into ranges, got one")
        return Segments(self.cu_seqlens.clamp(start, stop) - start, stop - start)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that hold the tokens of a batch's sequences, and how many all of them hold."""

    group: ProcessGroup
    counts: Tensor  # (2, B) int64 on the CPU: those of the batch, of all ranks together
    on_device: Tensor  # (2, B) the same where the batch is

    @property
    def num_tokens(self) -> int:
        """Tokens on all ranks."""
        return sum(host.values(self.counts)[0])

    def of_active(self, by_sequence: bool) -> SequenceGroup:
        """Return the same for the tokens with an advantage, or their whole sequences."""

        def chosen(counts: Tensor) -> Tensor:
            lengths, active = counts
            kept = torch.where(active > 0, lengths, 0) if by_sequence else active
            return torch.stack([kept, torch.full_like(kept, UNKNOWN)])

        return replace(self, counts=chosen(self.counts), on_device=chosen(self.on_device))

    def take(self, index: Tensor, kept: Tensor) -> SequenceGroup:
        """Return the same for sequences: an ``index`` on the device, flags ``kept`` on the CPU."""
        return replace(self, counts=self.counts[:, kept], on_device=self.on_device[:, index])


class _GroupSum(torch.autograd.Function):
    """Sums over ranks, in their order: all have the same bits. So are the gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # without sequences there is nothing to gather, on any rank
        return gather(values, group).sum(0) if values.numel() else values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
        return _GroupSum.apply(dsums, ctx.group), None


def joined_fields(group: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that ``make`` does, with the ranks of ``group``; or all ranks raise."""
    group = process_group("sequence_group", group)
    fields, failure = {}, None
    try:
        fields = make()
        optional = [*TOKEN_FIELDS, *SCALAR_FIELDS, "sampling_mask"]
        told = {
            "counts": host.values(fields["counts"]),
            # what follows has to be the same on all ranks; the names are those of messages
            "number of sequences": fields["counts"].shape[1],
            "optional arguments": [name for name in optional if fields.get(name) is not None],
            "gradient_accumulation_steps": fields["gradient_accumulation_steps"],
            "shape of advantages": "(T,)" if fields["advantages_per_token"] else "(B,)",
        }
    except ValueError as error:
        failure, told = error, {"error": str(error)}
    ranks: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(ranks, told, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(ranks):
        if "error" in other:
            raise ValueError(f"sequence_group: its rank {rank} has an error: {other['error']}")
    for name in told.keys() - {"counts"}:
        values = [other[name] for other in ranks]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"sequence_group: expected the same {name} on each of its ranks, got "
                f"{', '.join(map(str, values))}"
            )
    each = torch.tensor([rank["counts"] for rank in ranks])  # (n, 2, B)
    counts = each.sum(0)
    counts[1] = torch.where((each[:, 1] == UNKNOWN).any(), UNKNOWN, counts[1])
    on_device = counts.to(fields["target"].device, non_blocking=True)
    shared = SequenceGroup(group=group, counts=counts, on_device=on_device)
    return {**fields, "sequence_group": shared}
