"""linear_policy_loss inside torch.compile: one custom op that the compiler does not trace.

The op computes the loss and its gradients as outside torch.compile: the same choices, the same
bits. The compiler sees only tensors in and tensors out, so it guards neither on the lengths of a
batch nor on the loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import (
    CALL_SCHEMA,
    INPUTS,
    INPUTS_SCHEMA,
    NUM_CALL,
    NUM_INPUTS,
    REPORT,
    Gradients,
    Needs,
    RunOptions,
    WeightGrad,
    call_arguments,
    call_of_arguments,
    retry_on_oom,
)
from grpo_kernels.head import Head, check_plain, checked_head, stats_dtype
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, check_loss_inputs
from grpo_kernels.schedule.loss_metrics import loss_metrics
from grpo_kernels.schedule.loss_plan import Plan
from grpo_kernels.schedule.passes import LossParts, loss_backward, loss_forward, with_other_rows
from grpo_kernels.schedule.run import (
    at_all_positions,
    check_same_plan,
    checked_targets,
    planned_rows,
)

_NUM_PARTS = len(LossParts._fields)


def compiled_policy_loss(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    main_grad: Tensor | None,
) -> PolicyLossOutput:
    """Compute ``linear_policy_loss`` under torch.compile: traced by dynamo, one op in its graph."""
    if main_grad is not None:
        raise ValueError("main_grad: expected None inside torch.compile, got a buffer")
    if batch.sequence_group is not None:
        raise ValueError("sequence_group: expected None inside torch.compile, got a group")
    # the temperature comes from the config, which its key identifies
    head = replace(head, transform=replace(head.transform, temperature=1.0))
    hidden, head = checked_head(hidden, head, options.precision)
    inputs = (hidden, *head.tensors)
    check_plain(**dict(zip(INPUTS, inputs, strict=True)))
    outputs = policy_loss_op(
        *inputs,
        *call_arguments(head, options),
        needs=Needs.of(inputs).of_inputs,
        batch=batch.tensors(),
        per_token=batch.advantages_per_token,
        steps=batch.gradient_accumulation_steps,
        config=config.registry_key,
    )
    loss, logprobs, entropy, gate, report = outputs[:_NUM_PARTS]
    stats = partial(
        loss_metrics, logprobs, entropy, gate, report, batch, config, options.metric_rows
    )
    return PolicyLossOutput(loss, Metrics(stats, logprobs, entropy))


@torch.library.custom_op(
    "grpo_kernels::linear_policy_loss",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({INPUTS_SCHEMA}, {CALL_SCHEMA}, bool[] needs, Tensor?[] batch, bool per_token, "
        "int steps, Tensor config) -> "
        f"({', '.join(['Tensor'] * (_NUM_PARTS + NUM_INPUTS))})"
    ),
)
def policy_loss_op(*arguments):
    """Return the () loss; log-probabilities, entropy and its gate, (T,); the report of a sparse
    backward; and the gradients of the inputs for an unscaled loss, empty if not needed.
    """
    inputs, call, (needs, tensors, per_token, steps, key) = _split(arguments)
    config = LossConfig.of_registry_key(key)
    hidden = inputs[0]
    head, options = call_of_arguments(inputs, call, config.temperature)
    batch = TokenBatch.of_tensors(tensors, per_token, steps)
    check_loss_inputs(batch, config)
    states, plan = planned_rows(
        hidden=hidden,
        head=head,
        batch=batch,
        config=config,
        options=options,
        needs=Needs(*needs),
        weight_grad=WeightGrad(is_wide=hidden.dtype == torch.float16),
    )
    if not plan.route.backend.has_tiles:
        raise ValueError(f"backend: expected one that supports torch.compile, got {plan.backend!r}")
    check_same_plan(plan)
    parts, gradients = checked_targets(
        lambda: retry_on_oom(lambda plan: _run(states, plan), plan), plan
    )
    if gradients.hidden is not None:
        dhidden = at_all_positions(gradients.hidden, states, plan)
        gradients = gradients._replace(hidden=dhidden.reshape(hidden.shape))
    return (
        # outputs of an op must not share memory
        *(part.clone() for part in parts if part is not None),
        *(
            hidden.new_empty(0)
            if gradient is None or x is None
            else gradient.to(_until_scaled(x.dtype)).contiguous()
            for gradient, x in zip(gradients, inputs, strict=True)
        ),
    )


def _run(hidden: Tensor, plan: Plan) -> tuple[LossParts, Gradients]:
    parts, gradients, saved = loss_forward(hidden, plan)
    if gradients is None:
        gradients = loss_backward(hidden, plan, saved)
    logprobs, entropy = parts.logprobs, parts.entropy
    if plan.options.metric_rows == "all":
        logprobs, entropy = with_other_rows(logprobs, entropy, hidden, plan)
    elif logprobs.numel() < plan.batch.num_tokens:  # the compiler needs a known size
        logprobs, entropy = plan.active.merge(logprobs), plan.active.merge(entropy)
    gate = torch.ones_like(logprobs) if parts.entropy_gate is None else parts.entropy_gate
    report = logprobs.new_empty(0, dtype=torch.float64) if parts.bounded is None else parts.bounded
    return LossParts(
        loss=parts.loss, logprobs=logprobs, entropy=entropy, entropy_gate=gate, bounded=report
    ), gradients


def _until_scaled(dtype: torch.dtype) -> torch.dtype:
    """Return a gradient's dtype before the loss's gradient scales it: fp16 would underflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def _split(arguments: tuple) -> tuple[tuple, tuple, tuple]:
    """Split into inputs, the values of :data:`CALL_SCHEMA`, and the rest."""
    end = NUM_INPUTS + NUM_CALL
    return arguments[:NUM_INPUTS], arguments[NUM_INPUTS:end], arguments[end:]


@policy_loss_op.register_fake
def _(*arguments):
    inputs, call, (needs, tensors, *_) = _split(arguments)
    hidden = inputs[0]
    target = tensors[0]
    options = call_of_arguments(inputs, call)[1]
    dtype = stats_dtype(hidden.dtype)
    parts = (hidden.new_empty(target.shape, dtype=dtype) for _ in range(_NUM_PARTS - 2))
    bounded = options.bounded is not None and any(needs)
    report = hidden.new_empty(len(REPORT) if bounded else 0, dtype=torch.float64)
    gradients = (
        x.new_empty(x.shape, dtype=_until_scaled(x.dtype)) if needed else hidden.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )
    return (hidden.new_empty((), dtype=dtype), *parts, report, *gradients)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, _, (needs, *_) = _split(inputs)
    ctx.needs = needs
    ctx.num_others = len(inputs) - NUM_INPUTS
    ctx.dtypes = [None if x is None else x.dtype for x in tensors]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[_NUM_PARTS:])


def _backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple:
    scaled = [
        (gradient * dloss).to(dtype) if needed else None
        for gradient, needed, dtype in zip(ctx.saved_tensors, ctx.needs, ctx.dtypes, strict=True)
    ]
    return (*scaled, *[None] * ctx.num_others)


policy_loss_op.register_autograd(_backward, setup_context=_setup_context)
