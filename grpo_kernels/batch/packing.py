"""Checks a rollout and drops its masked tokens; one host transfer fetches every count."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels.batch.sampling_mask import check_sampling_mask

IGNORE_INDEX = -100
LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
SCALAR_FIELDS = ("num_items_in_batch", "num_tokens_in_micro_batch", "entropy_scale")
COUNT_FIELDS = ("lengths", "active_lengths")


class _Counts(NamedTuple):
    """What the host must know of a batch."""

    lengths: tuple[int, ...]  # (B,) valid tokens of each sequence
    active_lengths: tuple[int, ...] | None  # (B,) those whose advantage is not 0; None: not known
    max_target: int | None  # None: not known


def packed_fields(
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor,  # (B + 1,) int64 offsets in the caller's flattened layout
    optional: Mapping[str, Any],  # the FIELDS above, kept, gradient_accumulation_steps
) -> dict[str, Any]:
    """The fields of a ``TokenBatch`` that holds the valid tokens.

    Raises:
        ValueError: a shape, dtype, device or value is wrong; the message names the argument.
    """
    _check_optional(optional)
    starts = _mended(cu_seqlens, target.numel())
    given = _given_counts(optional, starts.numel() - 1)
    mask, bad_mask = _valid_mask(target, mask)
    advantages, per_token = _token_advantages(advantages, target, starts)
    logprobs = {name: _token_values(name, optional.get(name), target) for name in LOGPROB_FIELDS}
    sampling_mask = optional.get("sampling_mask")
    if sampling_mask is not None:
        check_sampling_mask(sampling_mask, target)
    scalars = {name: _scalar(name, optional.get(name), target) for name in SCALAR_FIELDS}
    active = mask & (advantages.reshape(target.shape) != 0)
    found = torch.stack([_per_sequence(mask, starts), _per_sequence(active, starts)])
    bad = [(starts != cu_seqlens).any(), bad_mask]
    flags = _value_flags(target, mask, advantages, logprobs, scalars, bad)
    if given is None or host.reading_is_free(target):
        counts = _fetched(flags, found, given, scalars, target.numel())
    else:
        counts = given
        _require(flags, found, given)
    total = sum(counts.lengths)
    keep = None
    if total < mask.numel():  # a nonzero() that needs no second transfer
        keep = torch.argsort(~mask.reshape(-1), stable=True)[:total]

    def take(values: Tensor) -> Tensor:
        return values.reshape(-1) if keep is None else values.reshape(-1)[keep]

    return {
        **optional,
        **scalars,
        "target": take(target),
        "advantages": take(advantages),
        "cu_seqlens": offsets_of(found[0]),
        **counts._asdict(),
        "rows": keep,
        "layout": tuple(target.shape),
        "advantages_per_token": per_token,
        "sampling_mask": sampling_mask.take(keep)
        if sampling_mask is not None and keep is not None
        else sampling_mask,
        **{name: take(value) if value is not None else None for name, value in logprobs.items()},
    }


def offsets_of(counts: Tensor) -> Tensor:
    """(B,) counts to the (B + 1,) offsets where each sequence begins and ends."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _mended(cu_seqlens: Tensor, total: int) -> Tensor:
    """The same if it rises from 0 to ``total``, else something that does and is safe to use."""
    if not cu_seqlens.numel():
        return cu_seqlens
    mended = cu_seqlens.clamp(0, total).cummax(0).values
    # slices are filled on the device; a number set at an index would be sent there, with a wait
    mended[:1], mended[-1:] = 0, total
    return mended


def _per_sequence(mask: Tensor, starts: Tensor) -> Tensor:
    """How many of each sequence's tokens are in the mask, (B,) int64."""
    return torch.segment_reduce(
        mask.reshape(-1).double(), "sum", lengths=starts.diff(), unsafe=True, initial=0
    ).long()


def _given_counts(optional: Mapping[str, Any], sequences: int) -> _Counts | None:
    lengths, active = (_count_tuple(name, optional.get(name), sequences) for name in COUNT_FIELDS)
    if lengths is None:
        if active is not None:
            raise ValueError(
                "lengths: expected the valid tokens that active_lengths are of, got None"
            )
        return None
    if active is not None and any(few > all_ for few, all_ in zip(active, lengths, strict=True)):
        raise ValueError(f"active_lengths: expected at most lengths {lengths}, got {active}")
    return _Counts(lengths, active, None)


def _count_tuple(name: str, value: Sequence[int] | None, sequences: int) -> tuple[int, ...] | None:
    if value is None:
        return None
    integers = isinstance(value, list | tuple) and all(
        isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
    )
    if not integers or len(value) != sequences:
        raise ValueError(f"{name}: expected {sequences} ints >= 0, one per sequence, got {value!r}")
    return tuple(value)


def _fetched(
    flags: Tensor,
    found: Tensor,  # (2, B)
    given: _Counts | None,
    scalars: Mapping[str, object],
    total: int,
) -> _Counts:
    """The counts by the batch's one transfer, after a check of its values."""
    low, high, *rest = host.fetch(torch.cat([flags, found.reshape(-1)]))
    _raise_on_flags(low, rest[: len(flags) - 2], scalars, total)
    each, sequences = rest[len(flags) - 2 :], found.shape[1]
    counts = _Counts(tuple(each[:sequences]), tuple(each[sequences:]), high)
    if given is None:
        return counts
    for name in COUNT_FIELDS:
        stated, true = getattr(given, name), getattr(counts, name)
        if stated not in (None, true):
            raise ValueError(f"{name}: expected {true} for these tensors, got {stated}")
    return counts._replace(active_lengths=given.active_lengths)


def _require(flags: Tensor, found: Tensor, given: _Counts) -> None:
    """The checks of values, later and on the device."""
    low, bad, totals = flags[0], flags[2:], found.sum(1)
    host.require(low >= 0, f"target: expected ids >= 0 (or {IGNORE_INDEX} for no loss)")
    host.require(
        ~bad.any(), "TokenBatch: expected rising cu_seqlens, a mask of 0 and 1, finite values"
    )
    for name, total in zip(COUNT_FIELDS, totals, strict=True):
        stated = getattr(given, name)
        if stated is not None:
            host.require(total == sum(stated), f"{name}: expected another sum for these tensors")


def check_target(target: Tensor, dim: int, shape: str) -> None:
    if not isinstance(target, Tensor) or target.dim() != dim:
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target: expected a {shape} tensor of token ids, got {got}")
    if target.dtype != torch.int64:
        raise ValueError(f"target: expected dtype torch.int64, got {target.dtype}")


def check_cu_seqlens(cu_seqlens: Tensor, target: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        raise ValueError(f"cu_seqlens: expected a (B + 1,) integer tensor, B >= 1, got {got!r}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    _check_device("cu_seqlens", cu_seqlens, target)


def _check_device(name: str, value: Tensor, target: Tensor) -> None:
    if value.device != target.device:
        raise ValueError(f"{name}: expected device {target.device} (of target), got {value.device}")


def _valid_mask(target: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return which tokens count, and whether a value is neither 0 nor 1, ()."""
    listed = target != IGNORE_INDEX
    if mask is None:
        return listed, listed.new_zeros(())
    if not isinstance(mask, Tensor) or mask.shape != target.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected the shape of target {tuple(target.shape)}, got {got}")
    _check_device("mask", mask, target)
    ones = mask != 0
    return ones & listed, (ones & (mask != 1)).any()


def _token_advantages(advantages: Tensor, target: Tensor, starts: Tensor) -> tuple[Tensor, bool]:
    """Return one advantage per token, and whether they were given so."""
    sequences = starts.numel() - 1
    per_token, per_sequence = tuple(target.shape), (sequences,)
    shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else None
    if shape not in (per_token, per_sequence):
        got = shape if shape is not None else type(advantages).__name__
        raise ValueError(
            f"advantages: expected shape {per_sequence} (per sequence) or {per_token} "
            f"(per token), got {got}"
        )
    if not advantages.is_floating_point():
        raise ValueError(f"advantages: expected a floating-point dtype, got {advantages.dtype}")
    _check_device("advantages", advantages, target)
    advantages = advantages.detach()
    if advantages.dtype != torch.float64:
        advantages = advantages.float()
    if shape == per_token:
        return advantages, True
    each = torch.repeat_interleave(advantages, starts.diff(), output_size=target.numel())
    return each, False


def _token_values(name: str, value: Tensor | None, target: Tensor) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.shape != target.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: expected the shape of target {tuple(target.shape)}, got {got}")
    if not value.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {value.dtype}")
    _check_device(name, value, target)
    value = value.detach()
    return value if value.dtype == torch.float64 else value.float()


def _scalar(name: str, value: Tensor | float | None, target: Tensor) -> Tensor | float | None:
    """A number, or a () tensor on the device of the target: nothing is sent there later."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    if not isinstance(value, Tensor) or value.dim():
        got = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name}: expected a scalar, got {got}")
    if value.device == target.device:
        return value
    return float(value) if value.device.type == "cpu" else value.to(target.device)


def _value_flags(
    target: Tensor,
    mask: Tensor,
    advantages: Tensor,
    logprobs: Mapping[str, Tensor | None],
    scalars: Mapping[str, Tensor | float | None],
    others: list[Tensor],  # (), whether something else is bad
) -> Tensor:
    """(11,) int64: lowest and highest valid target, then 1 for each kind of bad value."""

    def bad(value: Tensor | None, nan_is_fine: bool = False) -> Tensor:
        if value is None:
            return target.new_zeros(())
        wrong = value.isinf() if nan_is_fine else ~value.isfinite()
        return (wrong.reshape(target.shape) & mask).any().long()

    valid = torch.where(mask, target, 0)
    low, high = (valid.amin(), valid.amax()) if target.numel() else (valid.sum(), valid.sum())

    def bad_scalar(value: Tensor | float | None) -> Tensor:
        if isinstance(value, Tensor):
            return (~(value.isfinite() & (value >= 0))).long()
        right = value is None or (math.isfinite(value) and value >= 0)
        return torch.full_like(low, not right)

    flags = [
        low,
        high,
        bad(advantages),
        bad(logprobs["old_logprobs"]),
        bad(logprobs["ref_logprobs"]),
        bad(logprobs["rollout_logprobs"], nan_is_fine=True),
        *(bad_scalar(value) for value in scalars.values()),
        *(other.long() for other in others),
    ]
    return torch.stack(flags)


def _raise_on_flags(low: int, bad: list[int], scalars: Mapping[str, object], total: int) -> None:
    if low < 0:
        raise ValueError(f"target: expected ids >= 0 (or -100 for no loss), got {low}")
    *bad, bad_offsets, bad_mask = bad
    if bad_offsets:
        raise ValueError(f"cu_seqlens: expected offsets rising from 0 to T = {total}")
    if bad_mask:
        raise ValueError("mask: expected bool or 0 and 1, got other values")
    for name, flag in zip(("advantages", *LOGPROB_FIELDS, *SCALAR_FIELDS), bad, strict=True):
        if not flag:
            continue
        if name in scalars:
            raise ValueError(f"{name}: expected a finite number >= 0, got {scalars[name]!r}")
        raise ValueError(f"{name}: expected finite values on valid tokens, got NaN or infinity")


def _check_optional(optional: Mapping[str, Any]) -> None:
    known = (
        *LOGPROB_FIELDS,
        *SCALAR_FIELDS,
        *COUNT_FIELDS,
        "sampling_mask",
        "gradient_accumulation_steps",
    )
    for name in optional:
        if name not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}")
    steps = optional.get("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps: expected an int >= 1, got {steps!r}")
