"""linear_logprobs inside torch.compile: ops that the compiler does not look into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import OutputSpec, RowStats, StatsGrad, dtype_of, shapes_of
from grpo_kernels.batch import SamplingMask
from grpo_kernels.engine.bounded import saved_gradients
from grpo_kernels.engine.differentiable import rows_backward, rows_forward
from grpo_kernels.engine.gradients import Needs
from grpo_kernels.engine.logprobs_plan import LogprobsPlan
from grpo_kernels.engine.options import OPTIONS_SCHEMA, RunOptions
from grpo_kernels.engine.rows import Rows
from grpo_kernels.engine.saved_for_backward import NOTHING, OF_ALL_ROWS
from grpo_kernels.engine.shards import check_ranks_agree, raise_on_all_ranks
from grpo_kernels.head import (
    SHARD_SCHEMA,
    Head,
    HeadLoRA,
    Transform,
    no_second_derivative,
    shard_arguments,
    shard_of_arguments,
    stats_dtype,
)


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
    "float temperature, float logit_scale, float? softcap, float lora_scaling, "
    f"{SHARD_SCHEMA}, {OPTIONS_SCHEMA}"
)
_WANTED = "bool extras, bool mean, int top_k, bool[] needs"
_OUTPUTS = ", ".join(["Tensor"] * (len(RowStats._fields) + 1))  # the last is what is kept
_NUM_TENSORS, _NUM_OPTIONS = len(_Tensors._fields), _OPTIONS.count(",") + 1
_NUM_INPUTS = 5  # those that get gradients come first


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
        *shard_arguments(head.shard),
        *options.arguments,
    )


def _call(arguments: Sequence[Any]) -> tuple[Rows, RunOptions]:
    """Rebuild the call that :func:`_flat` was given."""
    x = _Tensors(*arguments[:_NUM_TENSORS])
    temperature, scale, softcap, lora_scaling, *rest = arguments[_NUM_TENSORS:]
    shard, options = shard_of_arguments(rest)
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
    head = Head(x.weight, x.bias, Transform(scale, softcap, per_row), lora, shard)
    rows = Rows(hidden=x.hidden, head=head, target=x.target, sampling_mask=mask)
    return rows, RunOptions.of_arguments(options)


def compiled_stats(
    rows: Rows, options: RunOptions, wanted: OutputSpec
) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows, and what is kept for the backward, as one op of a graph."""
    found = linear_logprobs_forward(*_flat(rows, options), *wanted, Needs.of(rows.inputs).of_inputs)
    return RowStats(*found[:-1]), found[-1]


def _forward_call(arguments: Sequence[Any]) -> tuple[Rows, LogprobsPlan]:
    """Rebuild the call of the forward."""
    rows, options = _call(arguments[: _NUM_TENSORS + _NUM_OPTIONS])
    *of_wanted, needs = arguments[_NUM_TENSORS + _NUM_OPTIONS :]
    return rows, LogprobsPlan.of(rows, options, OutputSpec(*of_wanted), Needs(*needs))


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it asks which rows are valid
    schema=f"({_TENSORS}, {_OPTIONS}, {_WANTED}) -> ({_OUTPUTS})",
)
def linear_logprobs_forward(*arguments):
    """Compute the statistics of (T, D) rows in the order of :class:`RowStats`, and what is kept
    for the backward; what is not computed is empty."""
    rows, plan = _forward_call(arguments)
    saving = plan.saving
    with raise_on_all_ranks(rows.head.shard, rows.hidden):
        valid = rows.valid()
    check_ranks_agree(valid, plan.route, plan.wanted, saving.kind)
    stats, kept = rows_forward(valid, plan)
    if kept is None:
        kept = rows.hidden.new_empty(0, dtype=saving.dtype)
    return (
        *(
            valid.scatter(value) if value is not None else rows.hidden.new_empty(0, dtype=dtype)
            for value, dtype in zip(stats, _stats_dtypes(rows), strict=True)
        ),
        valid.scatter(kept) if saving.kind in OF_ALL_ROWS else kept,
    )


def _stats_dtypes(rows: Rows) -> list[torch.dtype]:
    wide = stats_dtype(rows.hidden.dtype)
    return [dtype_of(name, wide) for name in RowStats._fields]


@linear_logprobs_forward.register_fake
def _(*arguments):
    rows, plan = _forward_call(arguments)
    shapes = shapes_of(rows.target.shape, plan.wanted, plan.masked)
    return (
        *(
            rows.hidden.new_empty(shapes.get(name, 0), dtype=dtype)
            for name, dtype in zip(RowStats._fields, _stats_dtypes(rows), strict=True)
        ),
        rows.hidden.new_empty(plan.saving.shape, dtype=plan.saving.dtype),
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({_TENSORS}, {_OPTIONS}, Tensor logp, Tensor entropy, Tensor lse, "
        "Tensor? dlogp, Tensor? dentropy, Tensor? dmasked, Tensor kept, str keeps, bool[] needs)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def linear_logprobs_backward(*arguments):
    """Compute the gradients of the differentiable statistics; one that is not needed is empty."""
    *call, logp, entropy, lse, dlogp, dentropy, dmasked, kept, keeps, needs = arguments
    rows, options = _call(call)
    outer = StatsGrad(dlogp, dentropy, dmasked)
    route = LogprobsPlan.of(rows, options, OutputSpec(), Needs(*needs)).route
    suffices = keeps != NOTHING and dlogp is not None and dentropy is None
    if keeps in OF_ALL_ROWS and suffices:
        valid = rows
    else:
        valid = rows.valid(None if suffices else outer.nonzero)
    outer = StatsGrad(*(valid.take(gradient) for gradient in outer))
    stats = RowStats(*(valid.take(found) for found in (logp, entropy, lse)))  # type: ignore[arg-type]
    if suffices:
        assert outer.dlogp is not None
        gradients = saved_gradients(keeps, kept, valid, stats, outer.dlogp, route, Needs(*needs))
    else:
        gradients = rows_backward(valid, stats, outer, route, Needs(*needs))
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=valid.scatter(gradients.hidden))
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
    return [rows.hidden if x is None else x for x in rows.inputs]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:_NUM_TENSORS], *output[:3], output[-1])  # logp, entropy, lse
    ctx.options = inputs[_NUM_TENSORS : _NUM_TENSORS + _NUM_OPTIONS]
    ctx.keeps = _forward_call(inputs)[1].saving.kind
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # entropy without a gradient needs no logits


def _backward(ctx, *outer):
    given = dict(zip(RowStats._fields, outer, strict=False))
    needed = ctx.needs_input_grad[:_NUM_INPUTS]
    saved = ctx.saved_tensors  # once: a checkpoint hands them out a single time
    *stats, kept = saved[_NUM_TENSORS:]
    gradients = linear_logprobs_backward(
        *saved[:_NUM_TENSORS], *ctx.options, *stats,
        *(_dense(given[name]) for name in ("logp", "entropy", "masked_logp")),
        kept, ctx.keeps, list(needed),
    )  # fmt: skip
    wanted = [x if need else None for x, need in zip(gradients, needed, strict=True)]
    others = len(ctx.needs_input_grad) - len(wanted)
    return (*wanted, *[None] * others)


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return it contiguous; None also for an output that was not asked for."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)
linear_logprobs_backward.register_autograd(no_second_derivative("linear_logprobs"))
