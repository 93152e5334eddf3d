"""Packs a rollout: validity, order, offsets, checks and counts of its tokens in one launch."""

from __future__ import annotations

import functools
import operator

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.gpu_tiles import NOT_FUSED
from grpo_kernels.batch import (
    CHECKED,
    SCALAR_FIELDS,
    TOKEN_FIELDS,
    UNKNOWN,
    BatchInputs,
    Findings,
    Packing,
    ValidTokens,
    host,
)

OPTIONS = {"num_warps": 8, **NOT_FUSED}
BLOCK, _CHECKED_BLOCK = 512, 256  # tokens, and sequences, at a time
COLUMNS = ("advantages", *TOKEN_FIELDS)
REPORT = ("lengths", "active_lengths", "least_target", "max_target", "wrong")
_INPUTS = ("ids", "mask", "cu_seqlens", "prompt_tokens", *COLUMNS, *SCALAR_FIELDS)
_RESULTS = ("packed_ids", "rows", "table", "offsets", "report")
_POINTERS = [f"{name}_ptr" for name in (*_INPUTS, *_RESULTS)]
_SIZES = ["num_tokens", "length", "stated"]
_IGNORE_INDEX = tl.constexpr(-100)
_INF = tl.constexpr(float("inf"))
# bits of the inputs in CHECKED; columns have consecutive bits, and so do scalars
_MASK, _CU_SEQLENS, _PROMPT_TOKENS, _ADVANTAGES, _NUMBERS = (
    tl.constexpr(CHECKED.index(name))
    for name in ("mask", "cu_seqlens", "prompt_tokens", "advantages", SCALAR_FIELDS[0])
)


@triton.jit
def _is_valid(ids_ptr, mask_ptr, at, inside):
    """Return which tokens carry a loss."""
    valid = inside & (tl.load(ids_ptr + at, mask=inside, other=_IGNORE_INDEX) != _IGNORE_INDEX)
    if mask_ptr is not None:
        valid = valid & (tl.load(mask_ptr + at, mask=inside, other=0) != 0)
    return valid


@triton.jit
def _bounds(cu_seqlens_ptr, sequence, num_tokens, BLOCK: tl.constexpr):
    """Return a sequence's start and end, clamped to be safe, and whether clamping changed them."""
    start = tl.zeros((), tl.int64)
    for first in range(0, sequence + 1, BLOCK):
        at = first + tl.arange(0, BLOCK)
        bound = tl.load(cu_seqlens_ptr + at, mask=at <= sequence, other=0)
        start = tl.maximum(start, tl.max(bound.to(tl.int64), axis=0))
    stated_start = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    stated_end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    end = tl.minimum(tl.maximum(start, stated_end), num_tokens)
    end = tl.where(sequence + 1 == tl.num_programs(0), num_tokens, end)
    start = tl.where(sequence == 0, 0, tl.minimum(start, num_tokens))
    return start, end, (start != stated_start) | (end != stated_end)


@triton.jit
def _any(flags, BIT: tl.constexpr):
    """Return the bit if any flag is set."""
    return tl.max(flags.to(tl.int32), axis=0) << BIT


@triton.jit
def _number_is_wrong(value_ptr, BIT: tl.constexpr):
    """Return the bit unless the number is finite and not negative."""
    wrong = tl.zeros((), tl.int32)
    if value_ptr is not None:
        value = tl.load(value_ptr)
        wrong = (1 - ((value >= 0) & (value < _INF)).to(tl.int32)) << BIT
    return wrong


@triton.jit
def _moved(from_ptr, at, valid, to_ptr):
    """Copy the values of valid tokens; return them, with zeros for the others."""
    value = tl.load(from_ptr + at, mask=valid, other=0.0).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, value, mask=valid)
    return value


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def _pack_tokens_kernel(
    ids_ptr,  # (N,) int64
    mask_ptr,  # (N,), or None
    cu_seqlens_ptr,  # (B + 1,); None: each sequence has ``length`` tokens
    prompt_tokens_ptr,  # (B,), or None
    advantages_ptr,  # (N,) if PER_TOKEN, else (B,)
    old_logprobs_ptr,  # (N,) or None, like the next ones
    ref_logprobs_ptr,
    rollout_logprobs_ptr,
    rollout_weights_ptr,
    num_items_in_batch_ptr,  # () fp64 or None, like the next ones
    num_tokens_in_micro_batch_ptr,
    num_sequences_in_micro_batch_ptr,
    num_prompts_ptr,
    entropy_scale_ptr,
    packed_ids_ptr,  # (N,) int64; the first T are written, like in the next two
    rows_ptr,  # (N,) int64
    table_ptr,  # (k, N): the present columns
    offsets_ptr,  # (B + 1,) int64
    report_ptr,  # (len(REPORT), B) int64
    num_tokens,  # N
    length,
    stated,  # T if the caller knows it, or 0
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    num_sequences = tl.num_programs(0)
    num_tokens = tl.cast(num_tokens, tl.int64)
    offs = tl.arange(0, BLOCK)
    wrong = tl.zeros((), tl.int32)
    if cu_seqlens_ptr is None:
        start = sequence * length
        end = start + length
    else:
        start, end, falls = _bounds(cu_seqlens_ptr, sequence, num_tokens, BLOCK)
        wrong |= falls.to(tl.int32) << _CU_SEQLENS

    earlier = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, start, BLOCK):
        at = first + offs
        earlier += _is_valid(ids_ptr, mask_ptr, at, at < start).to(tl.int32)
    before = tl.sum(earlier.to(tl.int64), axis=0)

    count = before
    active = tl.zeros((), tl.int64)
    least = tl.zeros((), tl.int64)
    most = tl.zeros((), tl.int64)
    for first in range(start, end, BLOCK):
        at = first + offs
        inside = at < end
        valid = _is_valid(ids_ptr, mask_ptr, at, inside)
        if mask_ptr is not None and mask_ptr.dtype.element_ty != tl.int1:
            value = tl.load(mask_ptr + at, mask=inside, other=0)
            wrong |= _any((value != 0) & (value != 1), _MASK)
        place = count + tl.cumsum(valid.to(tl.int32), axis=0) - 1
        ids = tl.load(ids_ptr + at, mask=valid, other=0)
        least = tl.minimum(least, tl.min(ids, axis=0))
        most = tl.maximum(most, tl.max(ids, axis=0))
        tl.store(packed_ids_ptr + place, ids, mask=valid)
        tl.store(rows_ptr + place, at, mask=valid)
        to_ptr = table_ptr + place
        whose = at if PER_TOKEN else at * 0 + sequence
        value = _moved(advantages_ptr, whose, valid, to_ptr)
        wrong |= _any(~(tl.abs(value) < _INF), _ADVANTAGES)
        active += tl.sum((value != 0).to(tl.int64), axis=0)
        if old_logprobs_ptr is not None:
            to_ptr += num_tokens
            value = _moved(old_logprobs_ptr, at, valid, to_ptr)
            wrong |= _any(~(tl.abs(value) < _INF), _ADVANTAGES + 1)
        if ref_logprobs_ptr is not None:
            to_ptr += num_tokens
            value = _moved(ref_logprobs_ptr, at, valid, to_ptr)
            wrong |= _any(~(tl.abs(value) < _INF), _ADVANTAGES + 2)
        if rollout_logprobs_ptr is not None:
            to_ptr += num_tokens
            value = _moved(rollout_logprobs_ptr, at, valid, to_ptr)
            wrong |= _any(tl.abs(value) == _INF, _ADVANTAGES + 3)
        if rollout_weights_ptr is not None:
            to_ptr += num_tokens
            value = _moved(rollout_weights_ptr, at, valid, to_ptr)
            wrong |= _any(~((value >= 0) & (value < _INF)), _ADVANTAGES + 4)
        count += tl.sum(valid.to(tl.int64), axis=0)

    if prompt_tokens_ptr is not None:
        too_few = tl.load(prompt_tokens_ptr + sequence) < count - before
        wrong |= too_few.to(tl.int32) << _PROMPT_TOKENS
    wrong |= _number_is_wrong(num_items_in_batch_ptr, _NUMBERS)
    wrong |= _number_is_wrong(num_tokens_in_micro_batch_ptr, _NUMBERS + 1)
    wrong |= _number_is_wrong(num_sequences_in_micro_batch_ptr, _NUMBERS + 2)
    wrong |= _number_is_wrong(num_prompts_ptr, _NUMBERS + 3)
    wrong |= _number_is_wrong(entropy_scale_ptr, _NUMBERS + 4)
    report_ptr += sequence
    tl.store(report_ptr, count - before)
    tl.store(report_ptr + num_sequences, active)
    tl.store(report_ptr + 2 * num_sequences, least)
    tl.store(report_ptr + 3 * num_sequences, most)
    tl.store(report_ptr + 4 * num_sequences, wrong.to(tl.int64))
    tl.store(offsets_ptr + sequence, before)
    if sequence + 1 == num_sequences:
        tl.store(offsets_ptr + num_sequences, count)
        # rows that do not exist are read before the check that rejects them
        for first in range(count, stated, BLOCK):
            at = first + offs
            tl.store(packed_ids_ptr + at, at * 0, mask=at < stated)
            tl.store(rows_ptr + at, at * 0, mask=at < stated)


@triton.jit(do_not_specialize=["num_sequences", "length", "active_length"])
def _check_report_kernel(
    report_ptr,  # (len(REPORT), B)
    passed_ptr,  # (4,) bool
    num_sequences,  # B
    length,  # of all sequences, from the caller
    active_length,
    BLOCK: tl.constexpr,
):
    total = tl.zeros((BLOCK,), tl.int64)
    active = tl.zeros((BLOCK,), tl.int64)
    least = tl.zeros((BLOCK,), tl.int64)
    wrong = tl.zeros((BLOCK,), tl.int64)
    for first in range(0, num_sequences, BLOCK):
        at = first + tl.arange(0, BLOCK)
        here = at < num_sequences
        total += tl.load(report_ptr + at, mask=here, other=0)
        active += tl.load(report_ptr + num_sequences + at, mask=here, other=0)
        least = tl.minimum(least, tl.load(report_ptr + 2 * num_sequences + at, mask=here, other=0))
        wrong |= tl.load(report_ptr + 4 * num_sequences + at, mask=here, other=0)
    tl.store(passed_ptr, tl.min(least, axis=0) >= 0)
    tl.store(passed_ptr + 1, tl.max(wrong, axis=0) == 0)
    tl.store(passed_ptr + 2, tl.sum(total, axis=0) == length)
    tl.store(passed_ptr + 3, tl.sum(active, axis=0) == active_length)


class KernelPacking(Packing):
    """Packs a rollout with one launch; the host reads the counts from pinned memory."""

    def __init__(self, inputs: BatchInputs) -> None:
        self._inputs = inputs
        size = inputs.num_tokens
        ids = inputs.target
        columns = inputs.columns.values()
        stated = inputs.stated
        wide = any(value.dtype == torch.float64 for value in columns)
        dtype = torch.float64 if wide else torch.float32
        self._packed_ids = ids.new_empty(size)
        self._rows = ids.new_empty(size)
        self._table = ids.new_empty((len(columns), size), dtype=dtype)
        self._offsets = ids.new_empty(inputs.num_sequences + 1)
        self._report = ids.new_empty((len(REPORT), inputs.num_sequences))
        values = {"ids": ids, "mask": inputs.mask, "cu_seqlens": inputs.cu_seqlens}
        values |= {"prompt_tokens": inputs.prompt_tokens, **inputs.columns}
        values |= inputs.scalars_on_device
        results = (self._packed_ids, self._rows, self._table, self._offsets, self._report)
        with torch.cuda.device_of(ids):
            _pack_tokens_kernel[(inputs.num_sequences,)](
                num_tokens=size,
                length=ids.shape[-1],
                stated=0 if stated is None else sum(host.values(stated)[0]),
                PER_TOKEN=inputs.advantages_per_token,
                BLOCK=BLOCK,
                **{f"{name}_ptr": _contiguous(values.get(name)) for name in _INPUTS},
                **{f"{name}_ptr": x for name, x in zip(_RESULTS, results, strict=True)},
                **OPTIONS,
            )
        self._transfer = host.start_transfer(self._report) if stated is None else None

    @property
    def cu_seqlens(self) -> Tensor:
        return self._offsets

    def findings(self) -> Findings:
        transfer = self._transfer or host.start_transfer(self._report)
        *counts, least, most, wrong = host.values(transfer.wait())
        bits = functools.reduce(operator.or_, wrong)
        names = [name for bit, name in enumerate(CHECKED) if bits >> bit & 1]
        return Findings(min(least), host.to_host(max(most)), names, counts)

    def passed(self, sums: tuple[int, int]) -> tuple[Tensor, ...]:
        flags = self._report.new_empty(4, dtype=torch.bool)
        with torch.cuda.device_of(flags):
            _check_report_kernel[(1,)](
                report_ptr=self._report,
                passed_ptr=flags,
                num_sequences=self._inputs.num_sequences,
                length=sums[0],
                active_length=sums[1],
                BLOCK=_CHECKED_BLOCK,
                **OPTIONS,
            )
        return flags.unbind()[: 3 if sums[1] == UNKNOWN else 4]

    def tokens(self, total: int) -> ValidTokens:
        columns = self._table[:, :total].unbind(0)
        if total == self._inputs.num_tokens:
            return ValidTokens(self._inputs.target.reshape(-1), columns, None)
        return ValidTokens(self._packed_ids[:total], columns, self._rows[:total])


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
