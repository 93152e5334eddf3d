"""Sequences of a packed batch, possibly spread over ranks: reductions and targets.

Shift first, then cut: the target of a rank's last row is the first token of another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from grpo_kernels.batch import host
from grpo_kernels.batch.inputs import (
    IGNORE_INDEX,
    SCALAR_FIELDS,
    TOKEN_FIELDS,
    UNKNOWN,
    check_cu_seqlens,
    check_target,
)
from grpo_kernels.common import check_like, check_name, gather, process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Segments:
    """Sums and means over sequences, in plain torch; a backend may have its own implementation.

    If a sequence's tokens are on several ranks, the methods reduce over whole sequences: they are
    collectives, and so are their derivatives.
    """

    cu_seqlens: Tensor  # (B + 1,) int64, from 0 to T
    total: int  # T
    across: SequenceGroup | None = None  # the ranks; None: only this one

    @property
    def lengths(self) -> Tensor:
        """(B,) tokens of each sequence."""
        return self.cu_seqlens.diff() if self.across is None else self.across.on_device[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.total if self.across is None else self.across.num_tokens

    def sum(self, values: Tensor) -> Tensor:
        """Sum (T,) values over each sequence, (B,), in fp64 and token order: invariant to batch."""
        wide = values.double()
        lengths = self.cu_seqlens.diff()
        sums = torch.segment_reduce(wide, "sum", lengths=lengths, unsafe=True, initial=0)
        if self.across is not None:
            sums = _GroupSum.apply(sums, self.across.group)
        return sums.to(values.dtype)

    def mean(self, values: Tensor) -> Tensor:
        """Average (T,) values over each sequence, (B,); 0 for an empty one."""
        return self.sum(values) / self.lengths.clamp(min=1)

    def max(self, values: Tensor) -> Tensor:
        """Return the maximum of (T,) values >= 0 over each sequence, (B,), detached; 0 if empty."""
        lengths = self.cu_seqlens.diff()
        values = values.detach()
        maximum = torch.segment_reduce(values, "max", lengths=lengths, unsafe=True, initial=0)
        if self.across is not None and maximum.numel():
            maximum = gather(maximum, self.across.group).amax(0)
        return maximum

    def running_sum(self, values: Tensor, decay: float = 1.0, backwards: bool = False) -> Tensor:
        """Return running sums of (T,) values in each sequence, from its first token or its last.

        A value is multiplied by ``decay`` for each later token. The sum is in fp64, in an order
        that depends only on the position in the sequence, so the bits are the same in every batch.
        """
        assert self.across is None  # checked at the API edge
        sums = values.double()
        before = self.places
        if backwards:
            sums = sums.flip(0)
            before = (self.expand(self.lengths) - 1 - before).flip(0)
        step = 1  # the number of values in each sum so far
        while step < self.total:
            earlier = pad(sums[:-step], (step, 0))
            sums = sums + torch.where(before >= step, earlier, 0.0) * decay**step
            step *= 2
        return (sums.flip(0) if backwards else sums).to(values.dtype)

    def quantile(self, values: Tensor, q: float) -> Tensor:
        """Return the ``q`` quantile of (T,) values in each sequence, (B,), as torch interpolates.

        Detached; undefined in an empty sequence.
        """
        assert self.across is None  # checked at the API edge
        order = values.detach().argsort()
        sequence = self.expand(torch.arange(len(self.lengths), device=values.device))
        ordered = pad(values.detach()[order[sequence[order].argsort(stable=True)]], (0, 1))
        place = q * (self.lengths - 1).clamp(min=0).double()
        low = self.cu_seqlens[:-1] + place.long()
        high = torch.minimum(low + 1, (self.cu_seqlens[1:] - 1).clamp(min=0))
        return torch.lerp(ordered[low], ordered[high], place.frac().to(values.dtype))

    @property
    def places(self) -> Tensor:
        """(T,) position of each token in its sequence, from 0."""
        return torch.arange(self.total, device=self.cu_seqlens.device) - self.expand(
            self.cu_seqlens[:-1]
        )

    def sum_all(self, values: Tensor) -> Tensor:
        """Sum (T,) values over all sequences, ()."""
        if self.across is None:
            return values.sum()
        total = values.sum(dtype=torch.float64).reshape(1)
        return _GroupSum.apply(total, self.across.group).reshape(()).to(values.dtype)

    def expand(self, values: Tensor) -> Tensor:
        """Return the value of each token's sequence: (B,) to (T,)."""
        return values[torch.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)]

    def narrow(self, start: int, stop: int) -> Segments:
        """Return the segments of tokens start..stop; cut sequences keep the part inside."""
        if self.across is not None:
            raise ValueError("sequence_group: expected None to cut a batch, got a group")
        return Segments(self.cu_seqlens.clamp(start, stop) - start, stop - start)


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroup:
    """The ranks that share the tokens of a batch's sequences, and the counts over all ranks."""

    group: ProcessGroup
    counts: Tensor  # (2, B) int64 on the CPU: as in the batch, summed over the ranks
    on_device: Tensor  # (2, B) the same, on the batch's device

    @property
    def num_tokens(self) -> int:
        """Tokens on all ranks."""
        return sum(host.values(self.counts)[0])

    def of_active(self, by_sequence: bool) -> SequenceGroup:
        """Return the group for the tokens with an advantage, or for their whole sequences."""

        def chosen(counts: Tensor) -> Tensor:
            lengths, active = counts
            kept = torch.where(active > 0, lengths, 0) if by_sequence else active
            return torch.stack([kept, torch.full_like(kept, UNKNOWN)])

        return replace(self, counts=chosen(self.counts), on_device=chosen(self.on_device))

    def take(self, index: Tensor, kept: Tensor) -> SequenceGroup:
        """Return the group for some sequences: ``index`` on the device, ``kept`` on the CPU."""
        return replace(self, counts=self.counts[:, kept], on_device=self.on_device[:, index])


class _GroupSum(torch.autograd.Function):
    """Sum over ranks in their order, so that all get the same bits; also for gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        # without sequences, no rank has anything to gather
        return gather(values, group).sum(0) if values.numel() else values.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
        return _GroupSum.apply(dsums, ctx.group), None


def joined_fields(group: Any, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the fields from ``make`` with the ranks of ``group``; on an error all ranks raise."""
    group = process_group("sequence_group", group)
    fields = {}
    failure = None
    try:
        fields = make()
        optional = [*TOKEN_FIELDS, *SCALAR_FIELDS, "sampling_mask", "prompt_tokens"]
        told = {
            "counts": host.values(fields["counts"]),
            # the following must be the same on all ranks; the names appear in messages
            "number of sequences": fields["counts"].shape[1],
            "optional arguments": [name for name in optional if fields.get(name) is not None],
            "gradient_accumulation_steps": fields["gradient_accumulation_steps"],
            "shape of advantages": "(T,)" if fields["advantages_per_token"] else "(B,)",
        }
    except ValueError as error:
        failure = error
        told = {"error": str(error)}
    ranks: list[dict[str, Any]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(ranks, told, group=group)
    if failure is not None:
        raise failure
    for rank, other in enumerate(ranks):
        if "error" in other:
            raise ValueError(f"sequence_group: rank {rank} raised an error: {other['error']}")
    for name in told.keys() - {"counts"}:
        values = [other[name] for other in ranks]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"sequence_group: expected the same {name} on all of its ranks, got "
                f"{', '.join(map(str, values))}"
            )
    each = torch.tensor([rank["counts"] for rank in ranks])  # (n, 2, B)
    counts = each.sum(0)
    counts[1] = torch.where((each[:, 1] == UNKNOWN).any(), UNKNOWN, counts[1])
    on_device = counts.to(fields["target"].device, non_blocking=True)
    shared = SequenceGroup(group=group, counts=counts, on_device=on_device)
    return {**fields, "sequence_group": shared}


def next_token_targets(
    input_ids: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return targets for next-token prediction: row t predicts token t + 1 of its sequence.

    Args:
        input_ids: (T,) int64 packed tokens, or (B, L) padded tokens.
        cu_seqlens: (B + 1,) offsets of packed sequences, from 0 to T; None for padded tokens.
        mask: shaped as ``input_ids``, bool or 0/1: 1 for completion tokens. None: all 1.

    Returns:
        int64 targets shaped as ``input_ids``; -100 in the last row of each sequence, and in rows
        before a token that does not count.

    Raises:
        ValueError: a shape, dtype, device or value is wrong; the message names the argument.
    """
    check_target(input_ids, cu_seqlens is not None, "input_ids")
    target = torch.full_like(input_ids, IGNORE_INDEX)
    following = input_ids[..., 1:]
    if mask is not None:
        check_like("mask", mask, input_ids, "input_ids")
        known = ((mask == 0) | (mask == 1)).all()
        host.assert_async(known, "mask: expected bool or 0 and 1, got other values")
        following = torch.where(mask[..., 1:] != 0, following, IGNORE_INDEX)
    target[..., :-1] = following
    total = input_ids.numel()
    if cu_seqlens is None or total == 0:
        return target
    check_cu_seqlens(cu_seqlens, input_ids, "input_ids")
    ends = cu_seqlens.long()
    rising = (ends.diff() >= 0).all() & (ends[0] == 0) & (ends[-1] == total)
    host.assert_async(rising, f"cu_seqlens: expected offsets rising from 0 to T = {total}")
    # an empty sequence ends where its predecessor does; at the very start that wraps to row T - 1
    return target.index_fill_(0, (ends[1:] - 1) % total, IGNORE_INDEX)


class RankRows(NamedTuple):
    """One rank's part of packed sequences."""

    rows: Tensor  # (R,) int64, its rows among the T rows, in the rank's order
    cu_seqlens: Tensor  # (B + 1,) int64, from 0 to R: the rank's part of each sequence


def context_parallel_rows(
    cu_seqlens: Tensor, *, rank: int, size: int, layout: str = "head_tail"
) -> RankRows:
    """Return the rows of packed sequences that a rank of a context-parallel group has.

    Index every per-token tensor (targets, masks, log-probabilities, per-token advantages) with
    ``rows``, and a :class:`SamplingMask` with ``sampling_mask.take(rows)``.

    Args:
        cu_seqlens: (B + 1,) offsets of the sequences, padding included, from 0 to T. The host reads
            them, so on a GPU it waits.
        rank: rank of this process in the group.
        size: number of ranks n.
        layout: how the rows are distributed:

            * ``"head_tail"``: rank i has chunks i and 2n - 1 - i of the 2n chunks of each sequence,
              as in Megatron-Core, in Transformer Engine's packed format and, for a row with a
              single sequence, in torch's ``context_parallel``. Lengths must be multiples of 2n.
            * ``"contiguous"``: rank i has the i-th of n equal parts of the whole packed row, as in
              Ulysses. T must be a multiple of n. A sequence may have no token on a rank.

    Returns:
        :class:`RankRows`, on the device of ``cu_seqlens``.

    Raises:
        ValueError: a rank, a layout or a length is wrong; the message names the argument.
    """
    check_name("layout", layout, _LAYOUTS)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size: expected an int >= 1, got {size!r}")
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise ValueError(f"rank: expected an int in [0, {size}), got {rank!r}")
    check_cu_seqlens(cu_seqlens)
    offsets = host.values(host.sync_to_host(cu_seqlens))
    if offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)):
        raise ValueError(f"cu_seqlens: expected offsets rising from 0, got {offsets}")
    return _LAYOUTS[layout](cu_seqlens.long(), offsets, rank, size)


def _head_tail(starts: Tensor, offsets: list[int], rank: int, size: int) -> RankRows:
    for index, (a, b) in enumerate(pairwise(offsets)):
        if (b - a) % (2 * size):
            raise ValueError(
                f"cu_seqlens: expected lengths that are multiples of 2 * size = {2 * size} (pad "
                f"each sequence), got {b - a} of sequence {index}"
            )
    chunks = starts.diff() // (2 * size)
    own = pad((2 * chunks).cumsum(0), (1, 0))
    total = offsets[-1] // size
    ids = torch.repeat_interleave(2 * chunks, output_size=total)
    place = torch.arange(total, device=starts.device) - own[ids]
    chunk = chunks[ids]
    in_tail = place >= chunk  # the tail starts 2n - 2 - 2i chunks after the end of the head
    rows = starts[ids] + rank * chunk + place + in_tail * (2 * (size - 1 - rank)) * chunk
    return RankRows(rows, own)


def _contiguous(starts: Tensor, offsets: list[int], rank: int, size: int) -> RankRows:
    total = offsets[-1]
    if total % size:
        raise ValueError(
            f"cu_seqlens: expected T to be a multiple of size = {size} (pad the last sequence, or "
            f"add one), got {total}"
        )
    start, stop = rank * total // size, (rank + 1) * total // size
    rows = torch.arange(start, stop, device=starts.device)
    return RankRows(rows, starts.clamp(start, stop) - start)


_LAYOUTS: dict[str, Callable[[Tensor, list[int], int, int], RankRows]] = {
    "head_tail": _head_tail,
    "contiguous": _contiguous,
}
