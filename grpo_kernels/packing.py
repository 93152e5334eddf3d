"""Checks a rollout and drops its masked tokens; one host transfer fetches every count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.kept import check_kept

IGNORE_INDEX = -100
LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
SCALAR_FIELDS = ("num_items_in_batch", "num_tokens_in_micro_batch", "entropy_scale")


def packed_fields(
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    starts: Tensor,  # (B + 1,) offsets in the caller's flattened layout
    optional: Mapping[str, Any],  # LOGPROB_FIELDS, SCALAR_FIELDS, kept, gradient_accumulation_steps
) -> dict[str, Any]:
    """The fields of a ``TokenBatch`` that holds the valid tokens.

    Raises:
        ValueError: a shape, dtype, device or value is wrong; the message names the argument.
    """
    _check_optional(optional)
    mask = _valid_mask(target, mask)
    advantages = _token_advantages(advantages, target, starts)
    logprobs = {name: _token_values(name, optional.get(name), target) for name in LOGPROB_FIELDS}
    kept = optional.get("kept")
    if kept is not None:
        check_kept(kept, target)
    scalars = {name: optional.get(name) for name in SCALAR_FIELDS}
    counts = torch.segment_reduce(
        mask.reshape(-1).double(), "sum", lengths=starts.diff(), unsafe=True, initial=0
    ).long()
    flags = _value_flags(target, mask, advantages, logprobs, scalars)
    low, high, *bad_and_lengths = torch.cat([flags, counts]).tolist()
    kinds = len(flags) - 2
    _raise_on_flags(low, bad_and_lengths[:kinds], scalars)
    lengths = bad_and_lengths[kinds:]
    total = sum(lengths)
    keep = None
    if total < mask.numel():  # a nonzero() that needs no second transfer
        keep = torch.argsort(~mask.reshape(-1), stable=True)[:total]

    def take(values: Tensor) -> Tensor:
        return values.reshape(-1) if keep is None else values.reshape(-1)[keep]

    return {
        **optional,
        "target": take(target),
        "advantages": take(advantages),
        "cu_seqlens": torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        "lengths": tuple(lengths),
        "rows": keep,
        "layout": tuple(target.shape),
        "max_target": high,
        "kept": kept.take(keep) if kept is not None and keep is not None else kept,
        **{name: take(value) if value is not None else None for name, value in logprobs.items()},
    }


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
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != target.numel() or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens: expected offsets rising from 0 to T = {target.numel()}, got {offsets}"
        )


def _check_device(name: str, value: Tensor, target: Tensor) -> None:
    if value.device != target.device:
        raise ValueError(f"{name}: expected device {target.device} (of target), got {value.device}")


def _valid_mask(target: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return target != IGNORE_INDEX
    if not isinstance(mask, Tensor) or mask.shape != target.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected the shape of target {tuple(target.shape)}, got {got}")
    _check_device("mask", mask, target)
    return (mask != 0) & (target != IGNORE_INDEX)


def _token_advantages(advantages: Tensor, target: Tensor, starts: Tensor) -> Tensor:
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
        return advantages
    return torch.repeat_interleave(advantages, starts.diff(), output_size=target.numel())


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


def _value_flags(
    target: Tensor,
    mask: Tensor,
    advantages: Tensor,
    logprobs: Mapping[str, Tensor | None],
    scalars: Mapping[str, Tensor | float | None],
) -> Tensor:
    """(9,) int64: lowest and highest valid target, then 1 for each kind of bad value."""

    def bad(value: Tensor | None, nan_is_fine: bool = False) -> Tensor:
        if value is None:
            return target.new_zeros(())
        wrong = value.isinf() if nan_is_fine else ~value.isfinite()
        return (wrong.reshape(target.shape) & mask).any().long()

    valid = torch.where(mask, target, 0)
    low, high = (valid.amin(), valid.amax()) if target.numel() else (valid.sum(), valid.sum())

    def bad_scalar(name: str) -> Tensor:
        if scalars[name] is None:
            return target.new_zeros(())
        value = torch.as_tensor(scalars[name], device=target.device, dtype=torch.float64)
        if value.dim():
            raise ValueError(f"{name}: expected a scalar, got {tuple(value.shape)}")
        return (~(value.isfinite() & (value >= 0))).long()

    flags = [
        low,
        high,
        bad(advantages),
        bad(logprobs["old_logprobs"]),
        bad(logprobs["ref_logprobs"]),
        bad(logprobs["rollout_logprobs"], nan_is_fine=True),
        *(bad_scalar(name) for name in SCALAR_FIELDS),
    ]
    return torch.stack(flags)


def _raise_on_flags(low: int, bad: list[int], scalars: Mapping[str, object]) -> None:
    if low < 0:
        raise ValueError(f"target: expected ids >= 0 (or -100 for no loss), got {low}")
    for name, flag in zip(("advantages", *LOGPROB_FIELDS, *SCALAR_FIELDS), bad, strict=True):
        if not flag:
            continue
        if name in scalars:
            raise ValueError(f"{name}: expected a finite number >= 0, got {scalars[name]!r}")
        raise ValueError(f"{name}: expected finite values on valid tokens, got NaN or infinity")


def _check_optional(optional: Mapping[str, Any]) -> None:
    known = (*LOGPROB_FIELDS, *SCALAR_FIELDS, "kept", "gradient_accumulation_steps")
    for name in optional:
        if name not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}")
    steps = optional.get("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps: expected an int >= 1, got {steps!r}")
