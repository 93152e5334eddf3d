"""Work of this package's schedules, read off ``logprob/schedule.py`` and ``recompute.py``."""

from __future__ import annotations

import torch

from grpo_kernels.engine.recompute import Slices, cut
from grpo_kernels.head import mkl
from grpo_kernels.head.head import logits_dtype
from grpo_kernels.tools.estimate.shape import WIDE, HeadShape, Setting
from grpo_kernels.tools.estimate.work import Work


def one_pass(head: HeadShape, setting: Setting, precision: str = "fp32") -> Work:
    """Gradients in the forward, chunk by chunk."""
    fit = setting.rows(head, precision)
    chunks = setting.num_chunks or -(-setting.tokens // fit)
    return _forward_only(head, setting, precision) + _sweep(head, setting, precision, chunks)


def two_pass(head: HeadShape, setting: Setting, precision: str = "fp32") -> Work:
    """Statistics first; the backward takes a slice of the vocabulary at a time."""
    work = _statistics(head, setting, precision, setting.tokens)
    work += _forward_only(head, setting, precision)
    fit = setting.rows(head, precision)
    if setting.sampling_mask:  # whole rows again: a sampling mask may reach into every slice
        return work + _sweep(head, setting, precision, -(-setting.tokens // fit))
    slices = cut(setting.tokens, head.vocabulary, fit * head.vocabulary)
    return work + _recompute(head, setting, precision, slices)


def product(kind: str, head: HeadShape, tokens: int, parts: int = 1) -> Work:
    """One product over the head, whose weight is read for each of the ``parts`` of the rows."""
    flop = 2.0 * tokens * head.size
    return Work(**{kind: flop}, traffic=float(parts) * head.size * head.width)  # type: ignore[arg-type]


def _sweep(head: HeadShape, setting: Setting, precision: str, chunks: int) -> Work:
    """The one loop of ``schedule.py``, with its gradients."""
    sampling_mask = logits_dtype(head.dtype, precision).itemsize
    exact = sampling_mask > head.width
    formed = exact and setting.on_cpu and setting.in_place  # the tile comes with its statistics
    kind = "fused_flop" if formed else _sums(head, setting) if exact else "flop"
    # statistics read the tile (or it is written along with them), the gradient reads it and
    # overwrites it; on a GPU one kernel does both while a row is in its cache
    reads = 2 if setting.on_cpu else 1
    logits = float(setting.tokens) * head.vocabulary
    work = product(kind, head, setting.tokens, chunks)
    work += Work(traffic=logits * (reads * sampling_mask + head.width), pieces=chunks, calls=1)
    work += product("flop", head, setting.tokens, chunks)  # dhidden
    if head.frozen:
        return work
    rounded = chunks == 1 and head.dtype != torch.float16 and not head.mixed
    return work + _dweight(head, setting, chunks, in_dtype=rounded)


def _statistics(head: HeadShape, setting: Setting, precision: str, tokens: int) -> Work:
    """The forward without a gradient."""
    if setting.forms_no_tile(head):
        return product("fused_flop", head, tokens)
    sampling_mask = logits_dtype(head.dtype, precision).itemsize
    kind = _sums(head, setting) if sampling_mask > head.width else "flop"
    chunks = -(-tokens // setting.rows(head, precision))
    passes = Work(traffic=float(tokens) * head.vocabulary * sampling_mask, pieces=chunks)
    return product(kind, head, tokens, chunks) + passes


def _forward_only(head: HeadShape, setting: Setting, precision: str) -> Work:
    """The rows without a gradient, the same in both schedules."""
    if not setting.forward_only:
        return Work()
    return _statistics(head, setting, precision, setting.forward_only)


def _recompute(head: HeadShape, setting: Setting, precision: str, slices: Slices) -> Work:
    """The loop of ``recompute.py``."""
    sampling_mask = logits_dtype(head.dtype, precision).itemsize
    tokens, parts, columns = setting.tokens, len(slices.rows), len(slices.columns)
    sums = _sums(head, setting)
    logits = float(tokens) * head.vocabulary
    work = product(sums if sampling_mask > head.width else "flop", head, tokens, parts)
    work += Work(traffic=logits * (sampling_mask + head.width), pieces=parts * columns, calls=1)
    # dhidden is summed over the slices
    work += product(sums, head, tokens, parts)
    work += Work(adding=(2.0 * columns - 1) * tokens * head.hidden * WIDE)
    if head.frozen:
        return work
    return work + _dweight(
        head, setting, parts, in_dtype=parts == 1 and head.dtype != torch.float16
    )


def _dweight(head: HeadShape, setting: Setting, parts: int, in_dtype: bool) -> Work:
    """The weight's gradient, summed over ``parts`` of the rows; one part may round its own."""
    if in_dtype or head.width == WIDE:
        work = product("flop", head, setting.tokens)
    else:
        work = product(_sums(head, setting), head, setting.tokens)
        work += Work(adding=float(head.size) * (WIDE + head.weight_width))  # rounded at last
    return work + Work(adding=2.0 * (parts - 1) * head.size * WIDE)


def _sums(head: HeadShape, setting: Setting) -> str:
    """What multiplies 16-bit factors into fp32 sums."""
    if head.width == WIDE:
        return "flop"
    if not setting.on_cpu:
        return "sums_flop"
    return "sums_flop" if mkl.available(head.dtype) else "wide_flop"
