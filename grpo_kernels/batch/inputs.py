"""The arguments of a batch, with every check that does not read tensor values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.batch.sampling_mask import SamplingMask, check_sampling_mask
from grpo_kernels.common import (
    NOT_NEGATIVE,
    check_device,
    check_integers,
    check_like,
    check_number,
    kind_of,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

IGNORE_INDEX = -100
TOKEN_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_weights")
SCALAR_FIELDS = (
    "num_items_in_batch",
    "num_tokens_in_micro_batch",
    "num_sequences_in_micro_batch",
    "num_prompts",
    "entropy_scale",
)
COUNT_FIELDS = ("lengths", "active_lengths")
# inputs with values that are checked on the device, in the order of their errors
CHECKED = ("mask", "cu_seqlens", "prompt_tokens", "advantages", *TOKEN_FIELDS, *SCALAR_FIELDS)
UNKNOWN = -1  # a count that is not known on the host


class OptionalFields(TypedDict, total=False):
    """The optional fields of a batch, in addition to targets, advantages and a mask."""

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    rollout_weights: Tensor | None
    sampling_mask: SamplingMask | None
    num_items_in_batch: Tensor | float | None
    num_tokens_in_micro_batch: Tensor | float | None
    num_sequences_in_micro_batch: Tensor | float | None
    num_prompts: Tensor | float | None
    prompt_tokens: Tensor | None
    entropy_scale: Tensor | float | None
    gradient_accumulation_steps: int
    lengths: Sequence[int] | None
    active_lengths: Sequence[int] | None
    sequence_group: ProcessGroup | DeviceMesh | None


@dataclass(frozen=True, kw_only=True)
class BatchInputs:
    """Arguments of a batch: N tokens of B sequences, with checked shapes, dtypes and devices."""

    target: Tensor  # (B, L) or (N,) int64
    mask: Tensor | None  # shaped as ``target``: 0 if a token does not count
    cu_seqlens: Tensor | None  # (B + 1,) int32 or int64 for packed tokens; None: padded
    num_sequences: int
    # floating-point: advantages, (B,) or shaped as ``target``; the others, shaped as ``target``
    columns: dict[str, Tensor]
    prompt_tokens: Tensor | None  # (B,) int32 or int64
    scalars: dict[str, Tensor | None]  # () fp64
    stated: Tensor | None  # (2, B) on the CPU: the counts that the caller passed
    sampling_mask: SamplingMask | None

    @staticmethod
    def checked(
        optional: Mapping[str, Any],  # OptionalFields
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        packed: bool,
    ) -> BatchInputs:
        """Return the inputs; raise ValueError for errors other than wrong values."""
        check_target(target, packed)
        if packed:
            check_cu_seqlens(cu_seqlens, target)
        _check_optional(target, optional)
        if mask is not None:
            check_like("mask", mask, target, "target")
        sequences = target.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
        return BatchInputs(
            target=target,
            mask=mask,
            cu_seqlens=cu_seqlens,
            num_sequences=sequences,
            columns=_columns(advantages, target, sequences, optional),
            scalars={name: _scalar(name, optional.get(name), target) for name in SCALAR_FIELDS},
            stated=_stated_counts(optional, sequences, target),
            prompt_tokens=_prompt_tokens(optional, sequences, target),
            sampling_mask=optional.get("sampling_mask"),
        )

    @property
    def num_tokens(self) -> int:
        """N, masked tokens included."""
        return self.target.numel()

    @property
    def advantages_per_token(self) -> bool:
        return self.columns["advantages"].shape == self.target.shape

    @property
    def scalars_on_device(self) -> dict[str, Tensor]:
        """The scalars that the host cannot check without waiting."""
        known = ((name, value) for name, value in self.scalars.items() if value is not None)
        return {name: value for name, value in known if not host.reading_is_free(value)}

    def message(self, name: str) -> str:
        """Return the error about wrong values of an input, one of ``CHECKED``."""
        if name == "mask":
            # hint at old_logprobs passed by position: mask is the fifth argument of losses
            floating = self.mask is not None and self.mask.is_floating_point()
            meant = " (is it old_logprobs=?)" if floating else ""
            return f"mask: expected bool or 0 and 1, got other values{meant}"
        if name == "cu_seqlens":
            return f"cu_seqlens: expected offsets rising from 0 to T = {self.num_tokens}"
        if name == "prompt_tokens":
            return "prompt_tokens: expected at least the tokens of each sequence"
        if name in SCALAR_FIELDS:
            return f"{name}: expected {NOT_NEGATIVE[0]}"
        if name == "rollout_weights":
            return f"{name}: expected finite values >= 0 on valid tokens, got others"
        return f"{name}: expected finite values on valid tokens, got NaN or infinity"


def _columns(
    advantages: Tensor, target: Tensor, sequences: int, optional: Mapping[str, Any]
) -> dict[str, Tensor]:
    shape = kind_of(advantages)
    per_token = tuple(target.shape)
    per_sequence = (sequences,)
    if shape not in (per_token, per_sequence):
        raise ValueError(
            f"advantages: expected shape {per_sequence} (per sequence) or {per_token} "
            f"(per token), got {shape}"
        )
    check_device("advantages", advantages, target.device, "target")
    columns = {"advantages": advantages}
    for name in TOKEN_FIELDS:
        if (value := optional.get(name)) is not None:
            check_like(name, value, target, "target")
            columns[name] = value
    for name, value in columns.items():
        if not value.is_floating_point():
            raise ValueError(f"{name}: expected a floating-point dtype, got {value.dtype}")
    return columns


def _prompt_tokens(optional: Mapping[str, Any], sequences: int, target: Tensor) -> Tensor | None:
    """Return the total number of tokens of each sequence's prompt, (B,)."""
    tokens = optional.get("prompt_tokens")
    if tokens is None:
        return None
    check_integers("prompt_tokens", tokens, "(B,) integer tensor")
    if len(tokens) != sequences:
        raise ValueError(
            f"prompt_tokens: expected one per sequence, {sequences}, got {len(tokens)}"
        )
    check_device("prompt_tokens", tokens, target.device, "target")
    return tokens


def _stated_counts(optional: Mapping[str, Any], sequences: int, target: Tensor) -> Tensor | None:
    """Return the caller's lists as (2, B) int64 on the CPU."""
    lengths, active = (optional.get(name) for name in COUNT_FIELDS)
    for name, value in zip(COUNT_FIELDS, (lengths, active), strict=True):
        integers = isinstance(value, list | tuple) and all(
            isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value
        )
        if value is not None and not (integers and len(value) == sequences):
            raise ValueError(
                f"{name}: expected {sequences} ints >= 0, one per sequence, got {value!r}"
            )
    most = target.shape[-1]
    fits = sum(lengths or ()) <= target.numel()
    if not fits or max(lengths or (), default=0) > most:
        raise ValueError(
            f"lengths: expected lengths that fit target of shape {tuple(target.shape)}, got "
            f"{lengths!r}"
        )
    if active is None:
        return None if lengths is None else host.to_host([lengths, [UNKNOWN] * sequences])
    if lengths is None:
        raise ValueError("lengths: expected them next to active_lengths, got None")
    if any(few > all_ for few, all_ in zip(active, lengths, strict=True)):
        raise ValueError(f"active_lengths: expected at most lengths {lengths}, got {active}")
    return host.to_host([lengths, active])


def check_target(target: Tensor, packed: bool, name: str = "target") -> None:
    """Raise ValueError unless ``target`` holds token ids of packed or padded sequences."""
    dim, shape = (1, "(T,)") if packed else (2, "(B, L)")
    if not isinstance(target, Tensor) or target.dim() != dim:
        raise ValueError(f"{name}: expected a {shape} tensor of token ids, got {kind_of(target)}")
    if target.dtype != torch.int64:
        raise ValueError(f"{name}: expected dtype torch.int64, got {target.dtype}")


def check_cu_seqlens(cu_seqlens: Any, target: Tensor | None = None, name: str = "target") -> None:
    """Raise ValueError unless ``cu_seqlens`` can be offsets of sequences on target's device."""
    check_integers("cu_seqlens", cu_seqlens, "(B + 1,) integer tensor, B >= 1", least=2)
    if target is not None:
        check_device("cu_seqlens", cu_seqlens, target.device, name)


def _scalar(name: str, value: Tensor | float | None, target: Tensor) -> Tensor | None:
    """Return a () fp64 tensor: a number stays on the host, a tensor is on the target's device."""
    if isinstance(value, Tensor):
        if value.dim():
            raise ValueError(f"{name}: expected {NOT_NEGATIVE[0]}, got shape {tuple(value.shape)}")
        if not host.reading_is_free(value):
            return value.double().to(target.device)
        value = host.values(value)
    if value is None:
        return None
    check_number(name, value, *NOT_NEGATIVE)
    return host.to_host(value, torch.float64)


def _check_optional(target: Tensor, optional: Mapping[str, Any]) -> None:
    known = ", ".join(OptionalFields.__annotations__)
    for name in optional:
        if name not in OptionalFields.__annotations__:
            raise ValueError(f"{name}: expected one of {known}")
    steps = optional.get("gradient_accumulation_steps", 1)
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"gradient_accumulation_steps: expected an int >= 1, got {steps!r}")
    if (sampling_mask := optional.get("sampling_mask")) is not None:
        check_sampling_mask(sampling_mask, target)
