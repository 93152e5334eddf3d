"""From a call to its plan, and from the plan to a loss that autograd can differentiate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_kernels.arguments import check_device
from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.engine import (
    INPUTS,
    Needs,
    Rows,
    RunOptions,
    check_ranks_agree,
    retry_on_oom,
    scaled_,
)
from grpo_kernels.head import (
    Head,
    check_local,
    check_mask_range,
    check_plain,
    check_target_range,
    checked_head,
    first_derivative_only,
    stats_dtype,
)
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, check_loss_inputs
from grpo_kernels.schedule.loss_metrics import loss_metrics
from grpo_kernels.schedule.loss_plan import Plan, make_plan
from grpo_kernels.schedule.passes import (
    LossParts,
    eager_loss,
    loss_backward,
    loss_forward,
    with_gradient,
    with_rest,
)
from grpo_kernels.schedule.rows_with_gradient import RowsWithGradient, rows_with_gradient

Result = TypeVar("Result")


def planned(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    main_grad: Tensor | None = None,
) -> tuple[Rows, Plan]:
    """Check a call and decide how it runs: the T rows of the batch's tokens, and the plan.

    Raises:
        ValueError: an argument is wrong, or what is asked for cannot run.
    """
    check_loss_inputs(batch, config)
    weight = head.weight
    hidden, head = checked_head(hidden, head, options.precision)
    needs = Needs.of((hidden, *head.tensors))
    if main_grad is not None:
        buffer = _checked_main_grad(main_grad, weight, hidden, head.weight.shape[0])
        needs = replace(needs, main_grad=buffer)
    return planned_rows(hidden, head, batch, config, options, needs)


def planned_rows(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    needs: Needs,
) -> tuple[Rows, Plan]:
    """Decide how a call with a checked head runs, whose gradients are those that it ``needs``."""
    _check_layout(hidden, head, batch)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    if batch.rows is not None:
        hidden = hidden.index_select(0, batch.rows)
    rows = _rows(hidden, head, batch)
    skips = needs.any or options.metric_rows == "active"
    active = rows_with_gradient(batch, config) if skips else RowsWithGradient(batch)
    return rows, make_plan(hidden.dtype, head, batch, config, options, active, needs)


def _rows(hidden: Tensor, head: Head, batch: TokenBatch) -> Rows:
    mask = batch.sampling_mask
    return Rows(hidden=hidden, head=head, target=batch.target, sampling_mask=mask)


def run_plan(rows: Rows, plan: Plan) -> PolicyLossOutput:
    """Compute the loss of a batch's T rows, as planned or with less memory."""
    check_same_plan(rows, plan)
    parts = checked_targets(
        lambda: retry_on_oom(lambda plan: _loss_parts(rows, plan), plan), rows, plan
    )
    made = partial(loss_metrics, *parts[1:], plan.batch, plan.config, plan.options.metric_rows)
    metrics = Metrics(made, parts.logp, parts.entropy)
    return PolicyLossOutput(parts.loss, metrics.ready_for(plan.batch))


def checked_targets(run: Callable[[], Result], rows: Rows, plan: Plan) -> Result:
    """Return what ``run`` does, with targets that the host does not know asserted on the device.

    Before it; or behind it where the first launch is a GEMM, whose kernels read and write no
    target's place outside of the vocabulary.
    """
    if plan.batch.max_target is not None:
        return run()

    def check() -> None:
        columns = plan.head.vocab_size
        inside = (rows.target < columns).all()
        host.assert_async(inside, f"target: expected ids in [0, {columns})")

    if not plan.route.exponentials:
        check()
    result = run()
    if plan.route.exponentials:
        check()
    return result


def _loss_parts(rows: Rows, plan: Plan) -> LossParts:
    if plan.needs.any and plan.route.backend.has_tiles:
        check_plain(**dict(zip(INPUTS, rows.inputs, strict=True)))
        parts = LossParts(*_PolicyLoss.apply(plan, rows, *rows.inputs))
    else:
        parts = eager_loss(rows, plan)
    if plan.options.metric_rows == "active":
        return parts
    logp, entropy = with_rest(parts.logp, parts.entropy, rows, plan)
    return parts._replace(logp=logp, entropy=entropy)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, rows: Rows, *inputs: Tensor | None) -> Any:
        parts, gradients, saved = loss_forward(rows, plan)
        # the head's tensors are autograd's to keep or to free
        ctx.plan = replace(plan, head=plan.head.without_tensors())
        ctx.gradients = gradients
        ctx.num_saved = len(saved)
        ctx.result_of = "linear_policy_loss"
        # the batch, too: autograd then refuses a backward after a change in place
        ctx.save_for_backward(*inputs, *saved, *plan.batch.tensors())
        ctx.mark_non_differentiable(*(x for x in parts[1:] if x is not None))
        ctx.set_materialize_grads(False)  # their zeros would only be dropped
        return tuple(parts)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, tensors: Any, dloss: Tensor, *others: Tensor) -> Any:
        inputs = tensors[: len(INPUTS)]
        hidden, *of_head = inputs
        plan = replace(ctx.plan, head=ctx.plan.head.with_tensors(*of_head))
        main_grad = plan.needs.main_grad

        def rows() -> Rows:
            return _rows(hidden, plan.head, plan.batch)

        if plan.schedule == "one_pass" and not plan.keeps:
            # the first backward takes the gradients over, so that the largest is never copied; a
            # second one, under retain_graph, computes them again
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                options = replace(plan.options, schedule="one_pass")
                again = replace(plan, route=replace(plan.route, options=options))
                gradients = retry_on_oom(lambda plan: loss_forward(rows(), plan)[1], again)
            if main_grad is not None:
                main_grad.addcmul_(gradients.weight, dloss.to(gradients.weight.dtype))
                gradients = gradients._replace(weight=None)
            gradients = scaled_(gradients, dloss, inputs, plan.route.backend)
        else:
            saved = tensors[len(INPUTS) : len(INPUTS) + ctx.num_saved]
            gradients = loss_backward(rows(), plan, saved, dloss)
        found = [
            None if gradient is None else gradient.to(x.dtype)
            for gradient, x in zip(gradients, inputs, strict=True)
        ]
        if found[0] is not None and plan.active.index is not None:
            found[0] = torch.zeros_like(hidden).index_copy(0, plan.active.index, found[0])
        return None, None, *found


def check_same_plan(rows: Rows, plan: Plan) -> None:
    """Raise on every rank unless all that share the vocabulary have the same plan and rows."""
    if rows.head.shard is None:
        return
    what = (plan.config, plan.schedule, plan.chunks, plan.batch.lengths, plan.needs.of_inputs)
    chosen = with_gradient(rows, plan)
    check_ranks_agree(chosen, plan.route, *what)


def _check_layout(hidden: Tensor, head: Head, batch: TokenBatch) -> None:
    columns, depth = head.vocab_size, head.weight.shape[1]
    layout = tuple(host.values(batch.layout))
    if tuple(hidden.shape[:-1]) != layout:
        raise ValueError(
            f"hidden: expected shape {(*layout, depth)} (the batch's layout and D: a row for each "
            f"token that is predicted), got {tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden.device)
    if batch.max_target is not None:
        check_target_range(0, host.values(batch.max_target), columns)
    if batch.sampling_mask is not None:
        check_mask_range(batch.sampling_mask.max_id, columns)


def _checked_main_grad(buffer: Tensor, weight: Tensor, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the rows of the caller's buffer that ids in use have; further ones are padding.

    Raises:
        ValueError: the buffer does not fit the weight, or nothing would be added to it.
    """
    if not isinstance(buffer, Tensor):
        raise ValueError(f"main_grad: expected a tensor, got {type(buffer).__name__}")
    check_local("main_grad", buffer)
    if not weight.requires_grad:
        raise ValueError("main_grad: expected None for a weight that needs no gradient")
    if buffer.shape != weight.shape or not buffer.is_contiguous():
        kind = "one" if buffer.is_contiguous() else "a non-contiguous one"
        raise ValueError(
            f"main_grad: expected a contiguous tensor of shape {tuple(weight.shape)} (of "
            f"weight), got {kind} of {tuple(buffer.shape)}"
        )
    wide = stats_dtype(hidden.dtype)
    if buffer.dtype != wide:
        raise ValueError(f"main_grad: expected dtype {wide}, got {buffer.dtype}")
    if buffer.device != weight.device:
        raise ValueError(f"main_grad: expected device {weight.device}, got {buffer.device}")
    if buffer.requires_grad:
        raise ValueError("main_grad: expected a tensor that needs no gradient")
    if buffer.data_ptr() == weight.data_ptr() and buffer.numel():
        raise ValueError("main_grad: expected a buffer of its own, got the weight")
    return buffer[:vocab_size]
