"""Targets of packed sequences, and which rows a rank has where sequences are cut over ranks.

Shift first, then cut: the target of a rank's last row is the first token of another rank.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.arguments import check_like, check_name
from grpo_kernels.batch import host
from grpo_kernels.batch.packing import IGNORE_INDEX, check_cu_seqlens, check_target


def next_token_targets(
    input_ids: Tensor, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """Return the targets of whole sequences: row t predicts token t + 1 of its own sequence.

    They are of the shape of ``input_ids``: -100 in the last row of each sequence, and where the
    token that follows does not count.

    Args:
        input_ids: (T,) int64 packed tokens, or (B, L) padded ones.
        cu_seqlens: (B + 1,) offsets of packed sequences, from 0 to T; None for padded ones.
        mask: of the shape of ``input_ids``, bool or 0/1: 1 for tokens of completions. None: all 1.

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
    # an empty sequence ends where the one before it does; before the first one that is row T - 1
    return target.index_fill_(0, (ends[1:] - 1) % total, IGNORE_INDEX)


class RankRows(NamedTuple):
    """The part of packed sequences that one rank has."""

    rows: Tensor  # (R,) int64, which of the T rows, in the rank's order
    cu_seqlens: Tensor  # (B + 1,) int64, from 0 to R: the same sequences, a part of each


def context_parallel_rows(
    cu_seqlens: Tensor, *, rank: int, size: int, layout: str = "head_tail"
) -> RankRows:
    """Return which rows of packed sequences a rank of a context-parallel group has.

    Index with ``rows`` whatever has a value per token (targets, masks, log-probabilities,
    advantages per token), and take a :class:`SamplingMask` by ``sampling_mask.take(rows)``.

    Args:
        cu_seqlens: (B + 1,) offsets of the sequences, padding included, from 0 to T. The host reads
            them: on a GPU it waits.
        rank: of this process in the group.
        size: the number of ranks n.
        layout: ``"head_tail"``: rank i has chunks i and 2n - 1 - i of the 2n of each sequence, as
            in Megatron-Core, in Transformer Engine's packed format and, for a row of one sequence,
            in torch's ``context_parallel``. Lengths have to be multiples of 2n.
            ``"contiguous"``: rank i has the i-th of n equal parts of the whole packed row, as in
            Ulysses. T has to be a multiple of n. A sequence may have no token on a rank.

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
    in_tail = place >= chunk  # the first of its rows follows 2n - 2 - 2i chunks after the head's
    rows = starts[ids] + rank * chunk + place + in_tail * (2 * (size - 1 - rank)) * chunk
    return RankRows(rows, own)


def _contiguous(starts: Tensor, offsets: list[int], rank: int, size: int) -> RankRows:
    total = offsets[-1]
    if total % size:
        raise ValueError(
            f"cu_seqlens: expected a T that is a multiple of size = {size} (pad the last sequence, "
            f"or add one), got {total}"
        )
    start, stop = rank * total // size, (rank + 1) * total // size
    rows = torch.arange(start, stop, device=starts.device)
    return RankRows(rows, starts.clamp(start, stop) - start)


_LAYOUTS: dict[str, Callable[[Tensor, list[int], int, int], RankRows]] = {
    "head_tail": _head_tail,
    "contiguous": _contiguous,
}
