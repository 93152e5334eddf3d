"""linear_policy_loss inside torch.compile: one op that the compiler does not look into.

The op computes the loss and its gradients as they are outside: the same choices, the same bits.
What the compiler sees is tensors in and tensors out, so it guards neither on the lengths of a batch
nor on the loss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import (
    OPTIONS_SCHEMA,
    REPORT,
    Gradients,
    Needs,
    RunOptions,
    retry_on_oom,
)
from grpo_kernels.head import (
    SHARD_SCHEMA,
    Head,
    HeadLoRA,
    Transform,
    autocast_dtype,
    check_plain,
    shard_arguments,
    shard_of_arguments,
    stats_dtype,
)
from grpo_kernels.losses import LazyMetrics, LossConfig, PolicyLossOutput
from grpo_kernels.schedule.loss_metrics import loss_metrics
from grpo_kernels.schedule.loss_plan import Plan
from grpo_kernels.schedule.loss_stage import LossStage, TracedStage
from grpo_kernels.schedule.passes import LossParts, loss_forward, two_pass_backward, with_rest
from grpo_kernels.schedule.run import check_same_plan, planned

_INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor? lora_a, Tensor? lora_b"
_NUM_INPUTS, _NUM_PARTS = len(Gradients._fields), len(LossParts._fields)


def compiled_policy_loss(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    main_grad: Tensor | None,
) -> PolicyLossOutput:
    """Compute ``linear_policy_loss`` for a compiler: traced by dynamo, and one op in its graph."""
    if main_grad is not None:
        raise ValueError("main_grad: expected None inside torch.compile, got a buffer")
    if batch.sequence_group is not None:
        raise ValueError("sequence_group: expected None inside torch.compile, got one")
    inputs = (hidden, *head.tensors)
    check_plain(**dict(zip(Gradients._fields, inputs, strict=True)))
    enabled = torch.is_grad_enabled()
    needs = [enabled and x is not None and x.requires_grad for x in inputs]
    transform, lora = head.transform, head.lora
    loss, *parts = policy_loss_op(
        *inputs, needs, batch.tensors(), batch.advantages_per_token,
        batch.gradient_accumulation_steps, config.registry_key, autocast_dtype(hidden.device),
        1.0 if lora is None else lora.scaling, transform.logit_scale, transform.softcap,
        *shard_arguments(head.shard), *options.arguments,
    )[:_NUM_PARTS]  # fmt: skip
    logp, entropy, *others = parts
    metrics = LazyMetrics(
        loss_metrics, *others, batch, config, options.metric_rows, logprobs=logp, entropy=entropy
    )
    return PolicyLossOutput(loss, metrics)


@torch.library.custom_op(
    "grpo_kernels::linear_policy_loss",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),
    schema=(
        f"({_INPUTS}, bool[] needs, Tensor?[] batch, bool per_token, int steps, Tensor config, "
        "ScalarType? autocast, float lora_scaling, float logit_scale, float? softcap, "
        f"{SHARD_SCHEMA}, {OPTIONS_SCHEMA}) -> "
        "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
)
def policy_loss_op(*arguments):
    """Return the () loss, the log-probabilities, entropy and its gate (T,), and the gradients of
    the inputs for an unscaled loss; one that is not needed is empty."""
    inputs, (needs, tensors, per_token, steps, number, autocast, *rest) = _split(arguments)
    lora_scaling, logit_scale, softcap, *rest = rest
    shard, options = shard_of_arguments(rest)
    hidden, weight, bias, lora_a, lora_b = inputs
    config, lora, dtypes = LossConfig.of_registry_key(number), None, _dtypes(inputs, autocast)
    if lora_a is not None and lora_b is not None:
        lora = HeadLoRA(a=lora_a, b=lora_b, scaling=lora_scaling)
    transform = Transform(logit_scale, softcap, config.temperature)
    head = Head(weight, bias, transform, lora, shard)
    batch = TokenBatch.of_tensors(tensors, per_token, steps)
    chosen = RunOptions.of_arguments(options)
    with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
        wanted = replace(Needs(*needs), wide=dtypes[0] == torch.float16)
        rows, plan = planned(hidden, head, batch, config, chosen, needs=wanted)
    if not plan.route.backend.has_tiles:
        raise ValueError(f"backend: expected another inside torch.compile, got {plan.backend!r}")
    check_same_plan(rows, plan)
    parts, gradients = retry_on_oom(lambda plan: _run(rows, plan), plan)
    gradients = gradients._replace(hidden=_of_all(gradients.hidden, plan, hidden))
    return (
        # outputs of an op may not share memory
        *(part.clone() for part in parts if part is not None),
        *(
            hidden.new_empty(0)
            if gradient is None
            else gradient.to(_until_scaled(dtype)).contiguous()
            for gradient, dtype in zip(gradients, dtypes, strict=True)
        ),
    )


def _run(rows: Tensor, plan: Plan) -> tuple[LossParts, Gradients]:
    if plan.stage is LossStage:  # there is no autograd inside an op
        plan = replace(plan, stage=TracedStage)
    parts, gradients, saved = loss_forward(rows, plan)
    if gradients is None:
        gradients = two_pass_backward(rows, plan, saved)
    logp, entropy, tokens = parts.logp, parts.entropy, plan.batch.num_tokens
    if plan.options.metric_rows == "all":
        logp, entropy = with_rest(logp, entropy, rows, plan)
    elif logp.numel() < tokens:  # a compiler has to know the size
        logp, entropy = plan.active.merge(logp, 0.0), plan.active.merge(entropy, 0.0)
    gate = torch.ones_like(logp) if parts.entropy_gate is None else parts.entropy_gate
    report = logp.new_empty(0, dtype=torch.float64) if parts.bounded is None else parts.bounded
    return LossParts(parts.loss, logp, entropy, gate, report), gradients


def _of_all(dhidden: Tensor | None, plan: Plan, hidden: Tensor) -> Tensor | None:
    """Return the gradient of (..., D) hidden states from that of the rows that have one."""
    if dhidden is None:
        return None
    batch, index = plan.batch, plan.active.index
    if index is not None:
        dhidden = dhidden.new_zeros(batch.num_tokens, hidden.shape[-1]).index_copy(
            0, index, dhidden
        )
    if batch.rows is not None:
        whole = dhidden.new_zeros(hidden.numel() // hidden.shape[-1], hidden.shape[-1])
        dhidden = whole.index_copy(0, batch.rows, dhidden)
    return dhidden.reshape(hidden.shape)


def _dtypes(inputs: tuple, autocast: torch.dtype | None) -> list[torch.dtype]:
    """Return the dtypes that gradients are rounded to: for the hidden states autocast's."""
    cast = autocast is not None and inputs[0].dtype != torch.float64
    own = [torch.float32 if x is None else x.dtype for x in inputs]
    return [autocast if cast else own[0], *own[1:]]  # type: ignore[list-item]


def _until_scaled(dtype: torch.dtype) -> torch.dtype:
    """Return a gradient's dtype before the loss's own gradient scales it: fp16 would underflow."""
    return torch.float32 if dtype == torch.float16 else dtype


def _split(arguments: tuple) -> tuple[tuple, tuple]:
    return arguments[:_NUM_INPUTS], arguments[_NUM_INPUTS:]


@policy_loss_op.register_fake
def _(*arguments):
    inputs, (needs, tensors, _, _, _, autocast, _, _, _, *rest) = _split(arguments)
    options = shard_of_arguments(rest)[1]
    hidden, target, dtypes = inputs[0], tensors[0], _dtypes(inputs, autocast)
    dtype = stats_dtype(dtypes[0])
    parts = (hidden.new_empty(target.shape, dtype=dtype) for _ in range(_NUM_PARTS - 2))
    bounded = RunOptions.of_arguments(options).bounded is not None and any(needs)
    report = hidden.new_empty(len(REPORT) if bounded else 0, dtype=torch.float64)
    gradients = (
        x.new_empty(x.shape, dtype=_until_scaled(own)) if needed else hidden.new_empty(0)
        for x, own, needed in zip(inputs, dtypes, needs, strict=True)
    )
    return (hidden.new_empty((), dtype=dtype), *parts, report, *gradients)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    tensors, (needs, _, _, _, _, autocast, *_) = _split(inputs)
    ctx.needs, ctx.others = needs, len(inputs) - _NUM_INPUTS
    ctx.dtypes = _dtypes(tensors, autocast)
    ctx.own = [None if x is None else x.dtype for x in tensors]
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[_NUM_PARTS:])


def _backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple:
    of_all = zip(ctx.saved_tensors, ctx.needs, ctx.dtypes, ctx.own, strict=True)
    scaled = [
        (gradient * dloss).to(dtype).to(own) if needed else None
        for gradient, needed, dtype, own in of_all
    ]
    return (*scaled, *[None] * ctx.others)


policy_loss_op.register_autograd(_backward, setup_context=_setup_context)
