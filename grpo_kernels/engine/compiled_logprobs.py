"""linear_logprobs inside torch.compile: custom ops that the compiler does not trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import OutputSpec, RowStats, StatsGrad, dtype_of, shapes_of
from grpo_kernels.batch import MASK_FIELDS, SamplingMask
from grpo_kernels.engine.differentiable import (
    DIFFERENTIABLE,
    contiguous,
    rows_forward,
    stats_backward,
)
from grpo_kernels.engine.logprobs_plan import NOTHING, OF_ALL_ROWS, LogprobsPlan
from grpo_kernels.engine.options import Bounded, RunOptions
from grpo_kernels.engine.rows import Needs, Rows
from grpo_kernels.engine.shards import check_ranks_agree, raise_on_all_ranks
from grpo_kernels.head import (
    Head,
    HeadLoRA,
    Transform,
    VocabShard,
    no_second_derivative,
    stats_dtype,
)

INPUTS_SCHEMA = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b"
CALL_SCHEMA = (
    "float temperature, float logit_scale, float? softcap, float lora_scaling, "
    "str? vocab_group, int vocab_rank, int[] vocab_rows, int vocab_size, "
    "str precision, str backend, int? max_workspace_bytes, bool batch_invariant, str schedule, "
    "str metric_rows, int? activation_bytes, bool bounded, float tolerance, int slots, "
    "bool exact_weight, int seed"
)
NUM_INPUTS, NUM_CALL = INPUTS_SCHEMA.count(",") + 1, CALL_SCHEMA.count(",") + 1
_PLAIN = tuple(name for name in RunOptions.__dataclass_fields__ if name != "backward")
_BOUNDED = tuple(Bounded.__dataclass_fields__)
_NO_SHARD = None, 0, [0], 0  # not []: torch treats an empty list as a list of tensors
_ARGUMENTS = (
    f"{INPUTS_SCHEMA}, Tensor?[] belongings, {CALL_SCHEMA}, "
    "bool extras, bool mean, int top_k, bool[] needs"
)
_NUM_OUTPUTS = len(RowStats._fields) + 1  # the last is the saved tensor


def call_arguments(head: Head, options: RunOptions) -> tuple[Any, ...]:
    """Return the values of :data:`CALL_SCHEMA`; per-row temperatures are passed separately."""
    transform = head.transform
    lora = head.lora
    shard = head.shard
    per_row = isinstance(transform.temperature, Tensor)
    bounded = options.bounded or Bounded()
    return (
        1.0 if per_row else float(transform.temperature),
        float(transform.logit_scale),
        None if transform.softcap is None else float(transform.softcap),
        1.0 if lora is None else float(lora.scaling),
        *(
            _NO_SHARD
            if shard is None
            else (shard.group, shard.rank, list(shard.rows), shard.vocab_size)
        ),
        *(getattr(options, name) for name in _PLAIN),
        options.bounded is not None,
        *(getattr(bounded, name) for name in _BOUNDED),
    )


def call_of_arguments(
    inputs: Sequence[Tensor | None],  # as in :data:`INPUTS_SCHEMA`
    arguments: Sequence[Any],  # as in :data:`CALL_SCHEMA`
    temperature: float | Tensor | None = None,  # overrides the one in ``arguments``
) -> tuple[Head, RunOptions]:
    """Return the head and the options with these :func:`call_arguments`."""
    _, weight, bias, a, b = inputs
    own, scale, softcap, scaling, group, rank, rows, vocab_size, *others = arguments
    transform = Transform(scale, softcap, own if temperature is None else temperature)
    lora = None if a is None or b is None else HeadLoRA(a=a, b=b, scaling=scaling)
    shard = None
    if group is not None:
        shard = VocabShard(group=group, rank=rank, rows=tuple(rows), vocab_size=vocab_size)
    options = dict(zip(_PLAIN, others, strict=False))
    is_bounded, *rest = others[len(_PLAIN) :]
    backward = Bounded(**dict(zip(_BOUNDED, rest, strict=True))) if is_bounded else "exact"
    assert weight is not None
    return Head(weight=weight, bias=bias, transform=transform, lora=lora, shard=shard), RunOptions(
        **options, backward=backward
    )


def op_call(rows: Rows, options: RunOptions, outputs: OutputSpec) -> tuple[Any, ...]:
    """Flatten a call into arguments of the forward op."""
    call = call_arguments(rows.head, options)
    needs = Needs.of(rows.inputs)
    return *rows.inputs, list(rows.belongings), *call, *outputs, needs.of_inputs


def planned_call(arguments: Sequence[Any]) -> tuple[Rows, LogprobsPlan]:
    """Rebuild the rows and the plan from the arguments of :func:`op_call`."""
    inputs, (belongings, *rest) = arguments[:NUM_INPUTS], arguments[NUM_INPUTS:]
    target, temperature, *of_mask = belongings
    mask = None
    if of_mask[0] is not None:
        mask = SamplingMask(**dict(zip(MASK_FIELDS, of_mask, strict=True)))
    head, options = call_of_arguments(inputs, rest[:NUM_CALL], temperature)
    *outputs, needs = rest[NUM_CALL:]
    rows = Rows(hidden=inputs[0], head=head, target=target, sampling_mask=mask)
    plan = LogprobsPlan.of(
        dtype=rows.hidden.dtype,
        head=head,
        tokens=rows.count,
        options=options,
        needs=Needs(*needs),
        outputs=OutputSpec(*outputs),
        masked=mask is not None,
    )
    return rows, plan


def compiled_stats(
    rows: Rows, options: RunOptions, outputs: OutputSpec
) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows, and the saved tensor, as one op of a graph."""
    *stats, saved = linear_logprobs_forward(*op_call(rows, options, outputs))
    return RowStats(*stats), saved


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # the host reads which rows are valid
    schema=f"({_ARGUMENTS}) -> ({', '.join(['Tensor'] * _NUM_OUTPUTS)})",
)
def linear_logprobs_forward(*arguments):
    """Compute the statistics of (T, D) rows in the order of :class:`RowStats`, and the tensor saved
    for the backward. Outputs that are not computed are empty."""
    rows, plan = planned_call(arguments)
    spec = plan.saved
    with raise_on_all_ranks(rows.head.shard, rows.hidden.device):
        selection = rows.with_target()
    valid = rows.selected(selection)
    check_ranks_agree(valid.target, valid.head, plan.route, (plan.outputs, spec.kind))
    stats, saved = rows_forward(valid, plan)
    if saved is None:
        saved = rows.hidden.new_empty(0, dtype=spec.dtype)
    return (
        *(
            selection.scatter(value) if value is not None else rows.hidden.new_empty(0, dtype=dtype)
            for value, dtype in zip(stats, _stats_dtypes(rows), strict=True)
        ),
        selection.scatter(saved) if spec.kind in OF_ALL_ROWS else saved,
    )


def _stats_dtypes(rows: Rows) -> list[torch.dtype]:
    wide = stats_dtype(rows.hidden.dtype)
    return [dtype_of(name, wide) for name in RowStats._fields]


@linear_logprobs_forward.register_fake
def _(*arguments):
    rows, plan = planned_call(arguments)
    shapes = shapes_of(rows.target.shape, plan.outputs, plan.masked)
    return (
        *(
            rows.hidden.new_empty(shapes.get(name, 0), dtype=dtype)
            for name, dtype in zip(RowStats._fields, _stats_dtypes(rows), strict=True)
        ),
        rows.hidden.new_empty(plan.saved.shape, dtype=plan.saved.dtype),
    )


@torch.library.custom_op(
    "grpo_kernels::linear_logprobs_backward",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=f"({_ARGUMENTS}, Tensor?[] saved) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def linear_logprobs_backward(*arguments):
    """Compute the gradients of the inputs; a gradient that is not needed is empty.

    ``saved``: log-probabilities, entropy, lse, the gradients of the :data:`DIFFERENTIABLE`
    statistics, and the tensor that the forward saved.
    """
    *call, tensors = arguments
    rows, plan = planned_call(call)
    selection = rows.with_target()
    kind = plan.saved.kind
    *of_rows, saved = tensors
    if kind == NOTHING:
        saved = None
    elif saved is not None and kind in OF_ALL_ROWS:
        saved = selection.gather(saved)
    of_rows = [None if x is None else selection.gather(x) for x in of_rows]
    stats = RowStats(*of_rows[:3])
    grad_stats = StatsGrad(*of_rows[3:])
    gradients = stats_backward(
        rows=rows.selected(selection), stats=stats, grad_stats=grad_stats, plan=plan, saved=saved
    )
    if gradients.hidden is not None:
        gradients = gradients._replace(hidden=selection.scatter(gradients.hidden))
    return tuple(
        gradient.to(x.dtype) if gradient is not None else x.new_empty(0)
        for gradient, x in zip(gradients, _likes(rows), strict=True)
    )


@linear_logprobs_backward.register_fake
def _(*arguments):
    rows, plan = planned_call(arguments[:-1])
    pairs = zip(_likes(rows), plan.needs.of_inputs, strict=True)
    return tuple(x.new_empty(x.shape if needed else 0) for x, needed in pairs)


def _likes(rows: Rows) -> list[Tensor]:
    """Return the inputs, with the hidden states as a placeholder for absent ones."""
    return [rows.hidden if x is None else x for x in rows.inputs]


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:NUM_INPUTS], *inputs[NUM_INPUTS], *output[:3], output[-1])
    ctx.call = inputs[NUM_INPUTS + 1 :]
    ctx.mark_non_differentiable(output[-1])
    ctx.set_materialize_grads(False)  # without a gradient of the entropy, no logits are needed


def _backward(ctx, *grad_stats):
    grads = dict(zip(RowStats._fields, grad_stats, strict=False))
    saved = ctx.saved_tensors  # read once: a checkpoint returns them a single time
    tensors = saved[:NUM_INPUTS]
    belongings = list(saved[NUM_INPUTS:-4])
    *stats, kept = saved[-4:]
    *call, needs = ctx.call
    needed = list(ctx.needs_input_grad[:NUM_INPUTS])
    if needed != list(needs):  # the saved tensor is for other gradients
        kept = None
    saved = [*stats, *(contiguous(grads[name]) for name in DIFFERENTIABLE), kept]
    gradients = linear_logprobs_backward(*tensors, belongings, *call, needed, saved)
    of_inputs = [x if need else None for x, need in zip(gradients, needed, strict=True)]
    return (*of_inputs, *[None] * (1 + len(ctx.call)))


linear_logprobs_forward.register_autograd(_backward, setup_context=_setup_context)
linear_logprobs_backward.register_autograd(no_second_derivative("linear_logprobs"))
