"""The torch.library ops behind linear_logprobs: schema, fake and autograd around the one loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import (
    BACKENDS,
    RowStats,
    StatsGradients,
    Wanted,
    dtype_of,
    reference_logprobs,
    requested_backend,
    shapes_of,
)
from grpo_kernels.batch import SamplingMask
from grpo_kernels.engine.gradients import Gradients, Needs
from grpo_kernels.engine.options import RunOptions
from grpo_kernels.engine.recompute import recompute_backward
from grpo_kernels.engine.retry import with_less_memory
from grpo_kernels.engine.route import Route, choose_route
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.sweep import forward, row_chunks, sweep
from grpo_kernels.head import (
    Head,
    HeadLoRA,
    Transform,
    check_plain,
    no_second_derivative,
    stats_dtype,
)


def head_stats(rows: Rows, options: RunOptions, wanted: Wanted = Wanted()) -> RowStats:  # noqa: B008
    """Compute the statistics of rows; a target of -100 marks one that costs nothing."""
    forced = BACKENDS.get(requested_backend(options.backend))
    if forced is None or forced.has_tiles:
        check_plain(**dict(zip(_DIFFERENTIABLE, (rows.hidden, *rows.head.tensors), strict=True)))
        return RowStats(*linear_logprobs_forward(*_flat(rows, options), *wanted))
    choose_route(rows.hidden.dtype, rows.head, options)  # for its checks
    valid = rows.valid()
    stats = reference_logprobs(
        valid.hidden, valid.head, valid.target, options.precision, valid.sampling_mask, wanted
    )
    return RowStats(*(valid.spread(x) if x is not None else None for x in stats))  # type: ignore[arg-type]


def rows_forward(rows: Rows, route: Route, wanted: Wanted = Wanted()) -> RowStats:  # noqa: B008
    """Compute the statistics of rows that all have a target, with as much memory as there is."""
    with torch.no_grad():
        return with_less_memory(lambda route: forward(rows, route, wanted), route)


def rows_backward(
    rows: Rows, stats: RowStats, outer: StatsGradients, route: Route, needs: Needs
) -> Gradients:
    """Compute gradients from what :func:`rows_forward` found, in fp32 or the hidden states' dtype.

    All of these rows have a gradient.
    """

    def run(route: Route) -> Gradients:
        if rows.sampling_mask is None:
            return recompute_backward(rows, stats, outer, route, needs)
        # its gradient needs the logits of all ids of a row's mask at once
        chunks = row_chunks(rows.count, route)
        stage = lambda part, stats: outer.rows(part)  # noqa: E731
        return sweep(rows, route, chunks, stage=stage, needs=needs)[1]

    return with_less_memory(run, route.tiled(), spoils=needs.main_grad is not None)


class _Tensors(NamedTuple):
    """The tensor arguments of the ops, as they stand in the schema."""

    hidden: Tensor  # (T, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    lora_a: Tensor | None  # (r, D)
    lora_b: Tensor | None  # (V, r)
    target: Tensor  # (T,)
    row_temperature: Tensor | None  # (T,)
    mask_indices: Tensor | None  # of a SamplingMask, as the next three
    mask_offsets: Tensor | None
    mask_bounds: Tensor | None
    mask_max_id: Tensor | None


_TENSORS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b, Tensor target, "
    "Tensor? row_temperature, Tensor? mask_indices, Tensor? mask_offsets, Tensor? mask_bounds, "
    "Tensor? mask_max_id"
)
_OPTIONS = (
    "float temperature, float logit_scale, float? softcap, float lora_scaling, str precision, "
    "str backend, int? max_workspace_bytes, bool batch_invariant"
)
_WANTED = "bool extras, bool rank, int top_k"
_STATS = ", ".join(["Tensor"] * len(RowStats._fields))
_NUM_TENSORS, _NUM_OPTIONS = len(_Tensors._fields), _OPTIONS.count(",") + 1
_NUM_WANTED = len(Wanted._fields)
_DIFFERENTIABLE = Gradients._fields


def _flat(rows: Rows, options: RunOptions) -> tuple[Any, ...]:
    """Flatten a call into the arguments of the ops."""
    head, mask = rows.head, rows.sampling_mask
    transform, temperature = head.transform, head.transform.temperature
    per_row = temperature if isinstance(temperature, Tensor) else None
    parts: Sequence[Tensor | None] = [None] * 4
    if mask is not None:
        parts = (mask.indices, mask.offsets, mask.bounds, mask.max_id)
    return (
        *(rows.hidden, *head.tensors, rows.target, per_row, *parts),
        1.0 if isinstance(temperature, Tensor) else float(temperature),
        float(transform.logit_scale),
        None if transform.softcap is None else float(transform.softcap),
        1.0 if head.lora is None else float(head.lora.scaling),
        options.precision,
        options.backend,
        options.max_workspace_bytes,
        options.batch_invariant,
    )


def _call(arguments: Sequence[Any]) -> tuple[Rows, RunOptions]:
    """Rebuild the call that :func:`_flat` was given."""
    x = _Tensors(*arguments[:_NUM_TENSORS])
    temperature, scale, softcap, lora_scaling, *options = arguments[_NUM_TENSORS:]
    lora = mask = None
    if x.lora_a is not None and x.lora_b is not None:
        lora = HeadLoRA(a=x.lora_a, b=x.lora_b, scaling=lora_scaling)
    if x.mask_indices is not None:
        mask = SamplingMask(
            indices=x.mask_indices,
            offsets=x.mask_offsets,  # type: ignore[arg-type]  # they come together
            bounds=x.mask_bounds,  # type: ignore[arg-type]
            max_id=x.mask_max_id,  # type: ignore[arg-type]
        )
    per_row = temperature if x.row_temperature is None else x.row_temperature
    head = Head(x.weight, x.bias, Transform(scale, softcap, per_row), lora)
    rows = Rows(hidden=x.hidden, head=head, target=x.target, sampling_mask=mask)
    names = ("precision", "backend", "max_workspace_bytes", "batch_invariant")
    return rows, RunOptions(**dict(zip(names, options, strict=True)))


def _route(rows: Rows, options: RunOptions, wanted: Wanted = Wanted()) -> Route:  # noqa: B008
    tiled = wanted.ranked or rows.sampling_mask is not None
    return choose_route(rows.hidden.dtype, rows.head, options, tiled)


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it asks which rows are valid
    schema=f"({_TENSORS}, {_OPTIONS}, {_WANTED}) -> ({_STATS})",
)
def linear_logprobs_forward(*arguments):
    """Compute the statistics of (T, D) rows in the order of :class:`RowStats`; others are empty."""
    rows, options = _call(arguments[:-_NUM_WANTED])
    wanted = Wanted(*arguments[-_NUM_WANTED:])
    valid = rows.valid()
    stats = rows_forward(valid, _route(rows, options, wanted), wanted)
    return tuple(
        valid.spread(value) if value is not None else rows.hidden.new_empty(0, dtype=dtype)
        for value, dtype in zip(stats, _stats_dtypes(rows), strict=True)
    )


def _stats_dtypes(rows: Rows) -> list[torch.dtype]:
    wide = stats_dtype(rows.hidden.dtype)
    return [dtype_of(name, wide) for name in RowStats._fields]


@linear_logprobs_forward.register_fake
def _(*arguments):
    rows, _ = _call(arguments[:-_NUM_WANTED])
    wanted = Wanted(*arguments[-_NUM_WANTED:])
    shapes = shapes_of(rows.target.shape, wanted, rows.sampling_mask is not None)
    return tuple(
        rows.hidden.new_empty(shapes.get(name, 0), dtype=dtype)
        for name, dtype in zip(RowStats._fields, _stats_dtypes(rows), strict=True)
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({_TENSORS}, {_OPTIONS}, Tensor logp, Tensor entropy, Tensor lse, "
        "Tensor? dlogp, Tensor? dentropy, Tensor? dmasked, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def linear_logprobs_backward(*arguments):
    """Compute the gradients of the differentiable statistics; one that is not needed is empty."""
    *call, logp, entropy, lse, dlogp, dentropy, dmasked, needs = arguments
    rows, options = _call(call)
    outer = StatsGradients(dlogp, dentropy, dmasked)
    valid = rows.valid(outer.nonzero)
    outer = StatsGradients(*(valid.take(gradient) for gradient in outer))
    stats = RowStats(*(valid.take(found) for found in (logp, entropy, lse)))  # type: ignore[arg-type]
    route = _route(rows, options)
    gradients = rows_backward(valid, stats, outer, route, Needs(*needs))
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=valid.spread(gradients.hidden))
    return tuple(
        gradient.to(x.dtype) if gradient is not None else x.new_empty(0)
        for gradient, x in zip(gradients, _inputs(rows), strict=True)
    )


@linear_logprobs_backward.register_fake
def _(*arguments):
    rows, _ = _call(arguments[: _NUM_TENSORS + _NUM_OPTIONS])
    return tuple(
        x.new_empty(x.shape if needed else 0)
        for x, needed in zip(_inputs(rows), arguments[-1], strict=True)
    )


def _inputs(rows: Rows) -> list[Tensor]:
    """Return the tensors that get gradients, or one to make an empty tensor from."""
    found = (rows.hidden, *rows.head.tensors)
    return [rows.hidden if x is None else x for x in found]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[:3])  # logp, entropy and lse
    ctx.options = inputs[_NUM_TENSORS:-_NUM_WANTED]


def _backward(ctx, *outer):
    given = dict(zip(RowStats._fields, outer, strict=True))
    needed = ctx.needs_input_grad[: len(_DIFFERENTIABLE)]
    saved = ctx.saved_tensors  # once: a checkpoint hands them out a single time
    gradients = linear_logprobs_backward(
        *saved[:_NUM_TENSORS], *ctx.options, *saved[_NUM_TENSORS:],
        *(_dense(given[name]) for name in ("logp", "entropy", "masked_logp")), list(needed),
    )  # fmt: skip
    wanted = [x if need else None for x, need in zip(gradients, needed, strict=True)]
    others = len(ctx.needs_input_grad) - len(wanted)
    return (*wanted, *[None] * others)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return it contiguous; None also for an output that was not asked for."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)
linear_logprobs_backward.register_autograd(no_second_derivative("linear_logprobs"))
