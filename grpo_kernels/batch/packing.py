"""Checks a rollout and drops its masked tokens; one host transfer fetches every count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.arguments import (
    NOT_NEGATIVE,
    check_device,
    check_integers,
    check_like,
    check_number,
    kind_of,
)
from grpo_kernels.batch import host
from grpo_kernels.batch.sampling_mask import check_sampling_mask

IGNORE_INDEX = -100
TOKEN_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_weights")
SCALAR_FIELDS = ("num_items_in_batch", "num_tokens_in_micro_batch", "entropy_scale")
COUNT_FIELDS = ("lengths", "active_lengths")
UNKNOWN = -1  # a count that the host does not know


class _Layout(NamedTuple):
    """The caller's tokens, flattened to N."""

    target: Tensor  # (N,)
    mask: Tensor  # (N,) bool, the valid ones
    bad_mask: Tensor | None  # (), whether the caller's mask has other values than 0 and 1
    sequences: int  # B
    # (B + 1,) int64, where packed sequences begin and end, safe to index with; None: all are N / B
    starts: Tensor | None
    bad_starts: Tensor | None  # (), whether the caller's were not


def packed_fields(
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,  # (B + 1,) of packed tokens; None: target is (B, L)
    packed: bool,
    optional: Mapping[str, Any],  # the FIELDS above, sampling_mask, gradient_accumulation_steps
) -> dict[str, Any]:
    """Return the fields of a ``TokenBatch`` that holds the valid tokens.

    Raises:
        ValueError: a shape, dtype, device or value is wrong; the message names the argument.
    """
    check_target(target, packed)
    if packed:
        check_cu_seqlens(cu_seqlens, target)
    _check_optional(optional)
    layout = _layout(target, mask, cu_seqlens)
    given = _given_counts(optional, layout.sequences)
    per_token = _check_advantages(advantages, target, layout)
    sampling_mask = optional.get("sampling_mask")
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, target)
    scalars = {name: _scalar(name, optional.get(name), target) for name in SCALAR_FIELDS}

    columns = {"advantages": _token_advantages(advantages, target, layout, per_token)}
    columns |= {
        name: _token_values(name, value, target)
        for name in TOKEN_FIELDS
        if (value := optional.get(name)) is not None
    }
    table = torch.stack(list(columns.values()))  # (k, N), of the max_local_vocab dtype
    offsets = _offsets(layout, table[0])  # (2, B + 1)
    names, flags = _value_flags(layout, table, list(columns), scalars)
    if given is None or host.reading_is_free(target):
        found = host.sync_to_host(torch.cat([*flags, offsets.reshape(-1)]))
        low, _, *rest = host.values(found)
        wrong = [name for name, flag in zip(names, rest, strict=False) if flag]
        _raise_on_flags(low, wrong, target.numel())
        counts, max_target = _agreed(_counts(rest[len(names) :]), given), found[1]
    else:
        counts, max_target = given, None
        _require(torch.cat(flags), offsets, given)

    total, keep = sum(host.values(counts)[0]), None
    picked = layout.target
    if total < picked.numel():
        # needs no transfer, unlike nonzero
        keep = layout.mask.argsort(stable=True, descending=True)[:total]
        picked, table = picked[keep], table[:, keep]
        sampling_mask = None if sampling_mask is None else sampling_mask.take(keep)
    return {
        "target": picked,
        **dict(zip(columns, table.unbind(0), strict=True)),
        "cu_seqlens": offsets[0],
        "counts": counts,
        "layout": host.to_host(target.shape),
        "rows": keep,
        "max_target": max_target,
        "advantages_per_token": per_token,
        "sampling_mask": sampling_mask,
        "gradient_accumulation_steps": optional.get("gradient_accumulation_steps", 1),
        **scalars,
    }


def _layout(target: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None) -> _Layout:
    flat, bad_mask = target.reshape(-1), None
    valid = flat != IGNORE_INDEX
    if mask is not None:
        check_like("mask", mask, target, "target")
        ones = mask.reshape(-1)
        if mask.dtype != torch.bool:
            given, ones = ones, ones != 0
            bad_mask = (ones & (given != 1)).any()
        valid = ones & valid
    if cu_seqlens is None:
        return _Layout(flat, valid, bad_mask, target.shape[0], None, None)
    starts = cu_seqlens.long().clamp(0, flat.numel()).cummax(0).values
    # slices are filled on the device; a number set at an index would be sent there, with a wait
    starts[:1], starts[-1:] = 0, flat.numel()
    bad_starts = (starts != cu_seqlens).any()
    return _Layout(flat, valid, bad_mask, starts.numel() - 1, starts, bad_starts)


def _offsets(layout: _Layout, advantages: Tensor) -> Tensor:
    """Return (2, B + 1) offsets of each sequence's valid tokens, and of those with an advantage."""
    both = torch.stack([layout.mask, layout.mask & (advantages != 0)])
    if layout.starts is not None:
        return pad(both.cumsum(1), (1, 0))[:, layout.starts]
    length = both.shape[1] // max(layout.sequences, 1)
    return pad(both.view(2, layout.sequences, length).sum(2).cumsum(1), (1, 0))


def _counts(offsets: list[int]) -> list[list[int]]:
    """Return the (2, B) lengths that the offsets imply."""
    half = len(offsets) // 2
    return [[b - a for a, b in pairwise(part)] for part in (offsets[:half], offsets[half:])]


def _given_counts(optional: Mapping[str, Any], sequences: int) -> Tensor | None:
    """Return the caller's lists as (2, B) int64 on the CPU."""
    lengths, active = (_count_list(name, optional.get(name), sequences) for name in COUNT_FIELDS)
    if lengths is None:
        if active is not None:
            raise ValueError(
                "lengths: expected the valid tokens that active_lengths are of, got None"
            )
        return None
    if active is not None and any(few > all_ for few, all_ in zip(active, lengths, strict=True)):
        raise ValueError(f"active_lengths: expected at most lengths {lengths}, got {active}")
    return host.to_host([lengths, active or [UNKNOWN] * sequences])


def _count_list(name: str, value: Sequence[int] | None, sequences: int) -> list[int] | None:
    if value is None:
        return None
    integers = isinstance(value, list | tuple) and all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
    )
    if not integers or len(value) != sequences:
        raise ValueError(f"{name}: expected {sequences} ints >= 0, one per sequence, got {value!r}")
    return list(value)


def _agreed(found: list[list[int]], given: Tensor | None) -> Tensor:
    """Return the counts (2, B) after comparing them with what the caller says they are."""
    if given is None:
        return host.to_host(found)
    for name, stated, true in zip(COUNT_FIELDS, host.values(given), found, strict=True):
        if UNKNOWN not in stated and stated != true:
            raise ValueError(
                f"{name}: expected {tuple(true)} for these tensors, got {tuple(stated)}"
            )
    return given


def _require(flags: Tensor, offsets: Tensor, given: Tensor) -> None:
    """Check the values later and on the device."""
    host.assert_async(flags[0] >= 0, f"target: expected ids >= 0 (or {IGNORE_INDEX} for no loss)")
    host.assert_async(
        ~flags[2:].any(),
        "TokenBatch: expected rising cu_seqlens, a mask of 0 and 1, finite values",
    )
    for name, stated, ends in zip(COUNT_FIELDS, host.values(given), offsets, strict=True):
        if UNKNOWN not in stated:
            host.assert_async(
                ends[-1] == sum(stated), f"{name}: expected another sum for these tensors"
            )


def check_target(target: Tensor, packed: bool, name: str = "target") -> None:
    """Raise ValueError unless ``target`` holds the token ids of packed or of padded sequences."""
    dim, shape = (1, "(T,)") if packed else (2, "(B, L)")
    if not isinstance(target, Tensor) or target.dim() != dim:
        raise ValueError(f"{name}: expected a {shape} tensor of token ids, got {kind_of(target)}")
    if target.dtype != torch.int64:
        raise ValueError(f"{name}: expected dtype torch.int64, got {target.dtype}")


def check_cu_seqlens(
    cu_seqlens: Tensor | None, target: Tensor | None = None, name: str = "target"
) -> None:
    """Raise ValueError unless ``cu_seqlens`` can be offsets of sequences, where ``target`` is."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        raise ValueError(f"cu_seqlens: expected a (B + 1,) integer tensor, B >= 1, got {got!r}")
    check_integers("cu_seqlens", cu_seqlens)
    if target is not None:
        check_device("cu_seqlens", cu_seqlens, target, name)


def _check_advantages(advantages: Tensor, target: Tensor, layout: _Layout) -> bool:
    """Return whether they are given one per token, or else one per sequence."""
    per_token, per_sequence = tuple(target.shape), (layout.sequences,)
    shape = kind_of(advantages)
    if shape not in (per_token, per_sequence):
        raise ValueError(
            f"advantages: expected shape {per_sequence} (per sequence) or {per_token} "
            f"(per token), got {shape}"
        )
    _check_floating("advantages", advantages)
    check_device("advantages", advantages, target, "target")
    return shape == per_token


def _check_floating(name: str, value: Tensor) -> None:
    if not value.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {value.dtype}")


def _token_advantages(
    advantages: Tensor, target: Tensor, layout: _Layout, per_token: bool
) -> Tensor:  # (N,)
    advantages = _wide(advantages)
    if per_token:
        return advantages.reshape(-1)
    if layout.starts is None:
        return advantages.unsqueeze(1).expand(target.shape).reshape(-1)
    sizes = layout.starts.diff()
    return torch.repeat_interleave(advantages, sizes, output_size=layout.target.numel())


def _token_values(name: str, value: Tensor, target: Tensor) -> Tensor:  # (N,)
    check_like(name, value, target, "target")
    _check_floating(name, value)
    return _wide(value).reshape(-1)


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    return value if value.dtype == torch.float64 else value.float()


def _scalar(name: str, value: Tensor | float | None, target: Tensor) -> Tensor | None:
    """Return a () fp64 tensor: a number stays on the host, a tensor is on the target's device."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        check_number(name, value, *NOT_NEGATIVE)
        return host.to_host(value, torch.float64)
    if value.dim():
        raise ValueError(f"{name}: expected {NOT_NEGATIVE[0]}, got shape {tuple(value.shape)}")
    value = value.double()
    if not host.reading_is_free(value):
        return value.to(target.device)
    check_number(name, host.values(value), *NOT_NEGATIVE)
    return value


def _value_flags(
    layout: _Layout,
    table: Tensor,  # (k, N)
    columns: Sequence[str],  # its rows
    scalars: Mapping[str, Tensor | None],
) -> tuple[list[str], list[Tensor]]:
    """Return names and flags to join: lowest and highest valid target, then 1 for a bad value."""
    target, mask = layout.target, layout.mask
    ids = target * mask
    ends = ids.aminmax(dim=0, keepdim=True) if ids.numel() else (ids.new_zeros(2),)
    wrong = (table - table) != 0  # NaN for what is not finite, 0 for the rest
    for row, name in enumerate(columns):
        if name == "rollout_logprobs":  # NaN says that the engine does not know
            wrong[row] = table[row].isinf()
        elif name == "rollout_weights":
            wrong[row] |= table[row] < 0
    others = {"cu_seqlens": layout.bad_starts, "mask": layout.bad_mask} | {
        name: ~(value.isfinite() & (value >= 0))
        for name, value in scalars.items()
        if value is not None and not host.reading_is_free(value)
    }
    present = {name: flag for name, flag in others.items() if flag is not None}
    flags = [*ends, (wrong & mask).any(1), *(flag.reshape(1) for flag in present.values())]
    return [*columns, *present], flags


def _raise_on_flags(low: int, bad: Sequence[str], total: int) -> None:
    if low < 0:
        raise ValueError(f"target: expected ids >= 0 (or {IGNORE_INDEX} for no loss), got {low}")
    expected = {
        "cu_seqlens": f"offsets rising from 0 to T = {total}",
        "mask": "bool or 0 and 1, got other values",
        **dict.fromkeys(SCALAR_FIELDS, NOT_NEGATIVE[0]),
        "rollout_weights": "finite values >= 0 on valid tokens, got others",
    }
    for name in bad:
        values = "finite values on valid tokens, got NaN or infinity"
        raise ValueError(f"{name}: expected {expected.get(name, values)}")


def _check_optional(optional: Mapping[str, Any]) -> None:
    others = ("sampling_mask", "gradient_accumulation_steps")
    known = (*TOKEN_FIELDS, *SCALAR_FIELDS, *COUNT_FIELDS, *others)
    for name in optional:
        if name not in known:
            raise ValueError(f"{name}: expected one of {', '.join((*known, 'sequence_group'))}")
    steps = optional.get("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps: expected an int >= 1, got {steps!r}")
