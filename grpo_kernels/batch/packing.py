"""Checks a rollout and drops its masked tokens; one host transfer fetches every count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypedDict

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
from grpo_kernels.batch.sampling_mask import SamplingMask, check_sampling_mask

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
UNKNOWN = -1  # a count that the host does not know
_NO_ID = f"target: expected ids >= 0 (or {IGNORE_INDEX} for no loss)"


class OptionalFields(TypedDict, total=False):
    """The optional fields of a batch, besides targets, advantages and a mask."""

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


def packed_fields(
    optional: Mapping[str, Any],  # OptionalFields
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None = None,  # (B + 1,) of packed tokens; None: target is (B, L)
    packed: bool = False,
) -> dict[str, Any]:
    """Return the fields of a ``TokenBatch`` that holds the valid tokens, of N that are given."""
    check_target(target, packed)
    if packed:
        check_cu_seqlens(cu_seqlens, target)
    _check_optional(target, optional)
    sampling_mask = optional.get("sampling_mask")
    ids = target.reshape(-1)
    wrong: dict[str, Tensor] = {}  # by message, () flags
    valid = ids != IGNORE_INDEX
    if mask is not None:
        check_like("mask", mask, target, "target")
        ones = mask.reshape(-1)
        if mask.dtype != torch.bool:
            given, ones = ones, ones != 0
            # of losses it is the fifth argument
            meant = " (is it old_logprobs=?)" if mask.is_floating_point() else ""
            message = f"mask: expected bool or 0 and 1, got other values{meant}"
            wrong[message] = (ones & (given != 1)).any()
        valid = ones & valid
    sequences, starts, sizes = _sequences(target, cu_seqlens, wrong)
    columns, per_token = _columns(advantages, target, sequences, sizes, optional)
    scalars = {name: _scalar(name, optional.get(name), target) for name in SCALAR_FIELDS}
    stated = _stated_counts(optional, sequences, target)

    table = torch.stack(list(columns.values()))  # (k, N), of the widest dtype
    both = torch.stack([valid, valid & (table[0] != 0)])
    offsets = pad(both.cumsum(1), (1, 0))[:, starts].expand(2, sequences + 1).contiguous()
    prompt_tokens = _prompt_tokens(optional, target, offsets[0], wrong)
    wrong |= _wrong_values(table, list(columns), valid, scalars)
    counted = ids * valid
    ends = counted.aminmax(dim=0, keepdim=True) if ids.numel() else (ids.new_zeros(2),)
    flags = [*ends, *(flag.reshape(1) for flag in wrong.values())]
    if stated is None or host.reading_is_free(target):
        found = host.sync_to_host(torch.cat([*flags, offsets.reshape(-1)]))
        low, _, *rest = host.values(found)
        if low < 0:
            raise ValueError(f"{_NO_ID}, got {low}")
        for message, flag in zip(wrong, rest, strict=False):
            if flag:
                raise ValueError(message)
        counts, max_target = _checked_counts(rest[len(wrong) :], stated), found[1]
    else:
        counts, max_target = stated, None
        _require(torch.cat(flags), offsets, stated)

    total, keep = sum(host.values(counts)[0]), None
    if total < ids.numel():
        # needs no transfer, unlike nonzero
        keep = valid.argsort(stable=True, descending=True)[:total]
        ids, table = ids[keep], table[:, keep]
        sampling_mask = None if sampling_mask is None else sampling_mask.take(keep)
    return {
        "target": ids,
        **dict(zip(columns, table.unbind(0), strict=True)),
        "cu_seqlens": offsets[0],
        "counts": counts,
        "layout": host.to_host(target.shape),
        "rows": keep,
        "max_target": max_target,
        "advantages_per_token": per_token,
        "sampling_mask": sampling_mask,
        "prompt_tokens": prompt_tokens,
        "gradient_accumulation_steps": optional.get("gradient_accumulation_steps", 1),
        **scalars,
    }


def _sequences(
    target: Tensor, cu_seqlens: Tensor | None, wrong: dict[str, Tensor]
) -> tuple[int, slice | Tensor, int | Tensor]:
    """Return how many sequences there are, where they begin and end, and how long each is."""
    if cu_seqlens is None:  # which takes no operation on the device
        sequences, length = target.shape
        return sequences, slice(None, None, length or 1), length
    # safe to index with
    starts = cu_seqlens.long().clamp(0, target.numel()).cummax(0).values
    # slices are filled on the device; a number set at an index would be sent there, with a wait
    starts[:1], starts[-1:] = 0, target.numel()
    rising = f"cu_seqlens: expected offsets rising from 0 to T = {target.numel()}"
    wrong[rising] = (starts != cu_seqlens).any()
    return starts.numel() - 1, starts, starts.diff()


def _columns(
    advantages: Tensor,
    target: Tensor,
    sequences: int,
    sizes: int | Tensor,  # tokens of each sequence, (B,), or of all alike
    optional: Mapping[str, Any],
) -> tuple[dict[str, Tensor], bool]:
    """Return what has a value per token, (N,), and whether the advantages were given so."""
    shape, per_token, per_sequence = kind_of(advantages), tuple(target.shape), (sequences,)
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
        wide = value if value.dtype == torch.float64 else value.float()
        columns[name] = wide.detach().reshape(-1)
    if shape != per_token:
        each = columns["advantages"]
        columns["advantages"] = each.repeat_interleave(sizes, output_size=target.numel())
    return columns, shape == per_token


def _prompt_tokens(
    optional: Mapping[str, Any],
    target: Tensor,
    offsets: Tensor,  # (B + 1,) of the sequences
    wrong: dict[str, Tensor],
) -> Tensor | None:
    """Return how many tokens the prompt of each sequence has in all, (B,) fp64."""
    tokens = optional.get("prompt_tokens")
    if tokens is None:
        return None
    check_integers("prompt_tokens", tokens, "(B,) integer tensor")
    lengths = offsets.diff()
    if len(tokens) != len(lengths):
        raise ValueError(
            f"prompt_tokens: expected one per sequence, {len(lengths)}, got {len(tokens)}"
        )
    check_device("prompt_tokens", tokens, target.device, "target")
    wrong["prompt_tokens: expected at least the tokens of each sequence"] = (tokens < lengths).any()
    return tokens.double()


def _wrong_values(
    table: Tensor,  # (k, N)
    columns: Sequence[str],  # its rows
    valid: Tensor,  # (N,)
    scalars: Mapping[str, Tensor | None],
) -> dict[str, Tensor]:
    """Return by message whether a valid token, or a number, has a wrong value."""
    wrong = (table - table) != 0  # NaN for what is not finite, 0 for the rest
    expected = ["finite values on valid tokens, got NaN or infinity"] * len(columns)
    for row, name in enumerate(columns):
        if name == "rollout_logprobs":  # NaN says that the engine does not know
            wrong[row] = table[row].isinf()
        elif name == "rollout_weights":
            wrong[row] |= table[row] < 0
            expected[row] = "finite values >= 0 on valid tokens, got others"
    of_tokens = zip(columns, expected, (wrong & valid).any(1), strict=True)
    found = {f"{name}: expected {said}": flag for name, said, flag in of_tokens}
    for name, value in scalars.items():
        if value is not None and not host.reading_is_free(value):
            found[f"{name}: expected {NOT_NEGATIVE[0]}"] = ~(value.isfinite() & (value >= 0))
    return found


def _require(flags: Tensor, offsets: Tensor, stated: Tensor) -> None:
    """Check the values later and on the device."""
    host.assert_async(flags[0] >= 0, _NO_ID)
    host.assert_async(
        ~flags[2:].any(), "TokenBatch: expected rising cu_seqlens, a mask of 0 and 1, finite values"
    )
    for name, counts, end in zip(COUNT_FIELDS, host.values(stated), offsets[:, -1], strict=True):
        if UNKNOWN not in counts:
            right = end == sum(counts)
            host.assert_async(right, f"{name}: expected another sum for these tensors")


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
    most, fits = target.shape[-1], sum(lengths or ()) <= target.numel()
    if not fits or max(lengths or (), default=0) > most:
        raise ValueError(
            f"lengths: expected those of tokens of shape {tuple(target.shape)}, got {lengths!r}"
        )
    if active is None:
        return None if lengths is None else host.to_host([lengths, [UNKNOWN] * sequences])
    if lengths is None:
        raise ValueError("lengths: expected the valid tokens that active_lengths are of, got None")
    if any(few > all_ for few, all_ in zip(active, lengths, strict=True)):
        raise ValueError(f"active_lengths: expected at most lengths {lengths}, got {active}")
    return host.to_host([lengths, active])


def _checked_counts(offsets: list[int], stated: Tensor | None) -> Tensor:
    """Return the (2, B) counts that the offsets imply, or what the caller says that they are."""
    half = len(offsets) // 2
    found = [[b - a for a, b in pairwise(part)] for part in (offsets[:half], offsets[half:])]
    if stated is None:
        return host.to_host(found)
    for name, counts, true in zip(COUNT_FIELDS, host.values(stated), found, strict=True):
        if UNKNOWN not in counts and counts != true:
            raise ValueError(
                f"{name}: expected {tuple(true)} for these tensors, got {tuple(counts)}"
            )
    return stated


def check_target(target: Tensor, packed: bool, name: str = "target") -> None:
    """Raise ValueError unless ``target`` holds the token ids of packed or of padded sequences."""
    dim, shape = (1, "(T,)") if packed else (2, "(B, L)")
    if not isinstance(target, Tensor) or target.dim() != dim:
        raise ValueError(f"{name}: expected a {shape} tensor of token ids, got {kind_of(target)}")
    if target.dtype != torch.int64:
        raise ValueError(f"{name}: expected dtype torch.int64, got {target.dtype}")


def check_cu_seqlens(cu_seqlens: Any, target: Tensor | None = None, name: str = "target") -> None:
    """Raise ValueError unless ``cu_seqlens`` can be offsets of sequences, where ``target`` is."""
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
