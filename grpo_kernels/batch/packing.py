"""Drops the masked tokens of a rollout. One transfer brings all counts and errors to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.batch import host
from grpo_kernels.batch.inputs import COUNT_FIELDS, IGNORE_INDEX, UNKNOWN, BatchInputs

_NO_ID = f"target: expected ids >= 0 (or {IGNORE_INDEX} for no loss)"


class Findings(NamedTuple):
    """Facts about a rollout's values, on the host."""

    least_target: int  # minimum over valid tokens and 0
    max_target: Tensor  # maximum over valid tokens and 0; () on the CPU
    wrong: list[str]  # the inputs with wrong values, in the order of ``CHECKED``
    counts: list[list[int]]  # (2, B)


class ValidTokens(NamedTuple):
    """The tokens of a rollout that carry a loss."""

    target: Tensor  # (T,)
    columns: tuple[Tensor, ...]  # (T,) each, fp32, or fp64 if any input is
    rows: Tensor | None  # (T,) positions among all N tokens; None: all


class Packing:
    """Packs a rollout with torch operations: the reference for a backend's kernel."""

    def __init__(self, inputs: BatchInputs) -> None:
        """Start all work on the device that does not need the number of valid tokens."""
        self._ids = inputs.target.reshape(-1)
        wrong = dict[str, Tensor]()
        self._valid = valid = self._ids != IGNORE_INDEX
        if (mask := inputs.mask) is not None:
            ones = mask.reshape(-1)
            if mask.dtype != torch.bool:
                values = ones
                ones = ones != 0
                wrong["mask"] = (ones & (values != 1)).any()
            self._valid = valid = ones & valid
        starts, sizes = _sequences(inputs, wrong)
        columns = _columns(inputs, sizes)
        self._table = table = torch.stack(list(columns.values()))  # (k, N), of the widest dtype
        both = torch.stack([valid, valid & (table[0] != 0)])
        shape = 2, inputs.num_sequences + 1
        self._offsets = pad(both.cumsum(1), (1, 0))[:, starts].expand(shape).contiguous()
        if inputs.prompt_tokens is not None:
            wrong["prompt_tokens"] = (inputs.prompt_tokens < self.cu_seqlens.diff()).any()
        wrong |= zip(columns, (_wrong_values(table, list(columns)) & valid).any(1), strict=True)
        for name, value in inputs.scalars_on_device.items():
            wrong[name] = ~(value.isfinite() & (value >= 0))
        self._names = list(wrong)
        flags = [flag.reshape(1) for flag in wrong.values()]
        ids = self._ids
        ends = (ids * valid).aminmax(dim=0, keepdim=True) if len(ids) else (ids.new_zeros(2),)
        self._flags = [*ends, *flags]

    @property
    def cu_seqlens(self) -> Tensor:
        """(B + 1,) offsets of the sequences of valid tokens."""
        return self._offsets[0]

    def findings(self) -> Findings:
        """Return the findings; the host waits for a device here."""
        flags = host.sync_to_host(torch.cat([*self._flags, self._offsets.reshape(-1)]))
        low, _, *rest = host.values(flags)
        names = self._names
        half = len(self.cu_seqlens)
        offsets = rest[len(names) :]
        counts = [[b - a for a, b in pairwise(part)] for part in (offsets[:half], offsets[half:])]
        wrong = [name for name, flag in zip(names, rest, strict=False) if flag]
        return Findings(low, flags[1], wrong, counts)

    def passed(self, sums: tuple[int, int]) -> tuple[Tensor, ...]:
        """Return () flags: whether the targets, all other values, and the sums of lengths and of
        active lengths are right. A sum that is ``UNKNOWN`` has no flag."""
        flags = torch.cat(self._flags)
        ends = zip(self._offsets[:, -1], sums, strict=True)
        right = (end == total for end, total in ends if total != UNKNOWN)
        return flags[0] >= 0, ~flags[2:].any(), *right

    def tokens(self, total: int) -> ValidTokens:
        """Return the ``total`` valid tokens."""
        ids = self._ids
        table = self._table
        rows = None
        if total < len(ids):
            # unlike nonzero, this needs no transfer
            rows = self._valid.argsort(stable=True, descending=True)[:total]
            ids = ids[rows]
            table = table[:, rows]
        return ValidTokens(ids, table.unbind(0), rows)


# device type -> function that packs a rollout there; None from it: use torch operations
PACKERS: dict[str, Callable[[BatchInputs], Packing | None]] = {}


def packed_fields(
    optional: Mapping[str, Any],  # OptionalFields
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None = None,  # (B + 1,) of packed tokens; None: target is (B, L)
    packed: bool = False,
) -> dict[str, Any]:
    """Return the fields of a ``TokenBatch`` with the valid tokens among the N given ones."""
    inputs = BatchInputs.checked(
        optional=optional,
        target=target,
        advantages=advantages,
        mask=mask,
        cu_seqlens=cu_seqlens,
        packed=packed,
    )
    pack = PACKERS.get(target.device.type)
    packing = (pack and pack(inputs)) or Packing(inputs)
    prompts = inputs.prompt_tokens
    fields = {
        "layout": host.to_host(target.shape),
        "cu_seqlens": packing.cu_seqlens,
        "advantages_per_token": inputs.advantages_per_token,
        "prompt_tokens": None if prompts is None else prompts.double(),
        "gradient_accumulation_steps": optional.get("gradient_accumulation_steps", 1),
        **inputs.scalars,
    }
    counts, max_target = _counts(packing, inputs)
    tokens = packing.tokens(sum(host.values(counts)[0]))
    sampling_mask = inputs.sampling_mask
    if sampling_mask is not None and tokens.rows is not None:
        sampling_mask = sampling_mask.take(tokens.rows)
    return {
        **fields,
        "target": tokens.target,
        **dict(zip(inputs.columns, tokens.columns, strict=True)),
        "counts": counts,
        "rows": tokens.rows,
        "max_target": max_target,
        "sampling_mask": sampling_mask,
    }


def _counts(packing: Packing, inputs: BatchInputs) -> tuple[Tensor, Tensor | None]:
    """Return the (2, B) counts and the largest target, None if the host does not read it.

    Raises:
        ValueError: a value is wrong. If the host reads no values, an assertion fails on the device
            instead.
    """
    stated = inputs.stated
    if stated is not None and not host.reading_is_free(inputs.target):
        _require(packing, stated)
        return stated, None
    findings = packing.findings()
    if findings.least_target < 0:
        raise ValueError(f"{_NO_ID}, got {findings.least_target}")
    for name in findings.wrong:
        raise ValueError(inputs.message(name))
    if stated is None:
        return host.to_host(findings.counts), findings.max_target
    for name, counts, true in zip(COUNT_FIELDS, host.values(stated), findings.counts, strict=True):
        if UNKNOWN not in counts and counts != true:
            raise ValueError(
                f"{name}: expected {tuple(true)} for these tensors, got {tuple(counts)}"
            )
    return stated, findings.max_target


def _require(packing: Packing, stated: Tensor) -> None:
    """Check the values asynchronously, on the device."""
    lengths, active = host.values(stated)
    passed = packing.passed((sum(lengths), UNKNOWN if UNKNOWN in active else sum(active)))
    values = "TokenBatch: expected rising cu_seqlens, a mask of 0 and 1, finite values"
    sums = (f"{name}: expected a sum that matches these tensors" for name in COUNT_FIELDS)
    for flag, message in zip(passed, (_NO_ID, values, *sums), strict=False):
        host.assert_async(flag, message)


def _sequences(
    inputs: BatchInputs, wrong: dict[str, Tensor]
) -> tuple[slice | Tensor, int | Tensor]:
    """Return the starts and ends of the sequences, and the number of tokens of each."""
    cu_seqlens = inputs.cu_seqlens
    total = inputs.num_tokens
    if cu_seqlens is None:  # padded: no operation on the device
        length = inputs.target.shape[1]
        return slice(None, None, length or 1), length
    # safe to index with
    starts = cu_seqlens.long().clamp(0, total).cummax(0).values
    # slices are filled on the device; setting one index would send a number there, and wait
    starts[:1] = 0
    starts[-1:] = total
    wrong["cu_seqlens"] = (starts != cu_seqlens).any()
    return starts, starts.diff()


def _columns(inputs: BatchInputs, sizes: int | Tensor) -> dict[str, Tensor]:
    """Return the inputs with a value per token, (N,) each."""
    columns = {}
    for name, value in inputs.columns.items():
        wide = value if value.dtype == torch.float64 else value.float()
        columns[name] = wide.detach().reshape(-1)
    if not inputs.advantages_per_token:
        each = columns["advantages"]
        total = inputs.num_tokens
        columns["advantages"] = each.repeat_interleave(sizes, output_size=total)
    return columns


def _wrong_values(table: Tensor, columns: list[str]) -> Tensor:  # (k, N)
    """Return (k, N): which values are wrong for a valid token."""
    wrong = (table - table) != 0  # x - x is NaN unless x is finite
    for row, name in enumerate(columns):
        if name == "rollout_logprobs":  # NaN: the engine did not report it
            wrong[row] = table[row].isinf()
        elif name == "rollout_weights":
            wrong[row] |= table[row] < 0
    return wrong
