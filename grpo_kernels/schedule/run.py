"""From a call to its plan, and from the plan to the loss."""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.arguments import check_device
from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.engine import Needs, RunOptions, check_ranks_agree, retry_on_oom
from grpo_kernels.head import (
    Head,
    check_mask_range,
    check_target_range,
    checked_head,
)
from grpo_kernels.losses import LazyMetrics, LossConfig, PolicyLossOutput, check_loss_inputs
from grpo_kernels.schedule.loss_metrics import LossParts, loss_metrics
from grpo_kernels.schedule.loss_plan import Plan, make_plan
from grpo_kernels.schedule.main_grad import checked_main_grad
from grpo_kernels.schedule.one_pass import one_pass
from grpo_kernels.schedule.rows_with_gradient import RowsWithGradient, rows_with_gradient
from grpo_kernels.schedule.two_pass import two_pass, with_rest


def planned(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    main_grad: Tensor | None = None,
    needs: Needs | None = None,  # None: as autograd says
) -> tuple[Tensor, Plan]:
    """Check a call and decide how it runs: the (T, D) rows of the batch's tokens, and the plan.

    Raises:
        ValueError: an argument is wrong, or what is asked for cannot run.
    """
    check_loss_inputs(batch, config)
    weight = head.weight
    hidden, head = checked_head(hidden, head, options.precision)
    _check_layout(hidden, head, batch)
    if main_grad is not None:
        main_grad = checked_main_grad(main_grad, weight, hidden, head.weight.shape[0])
    rows = hidden.reshape(-1, hidden.shape[-1])
    if batch.rows is not None:
        rows = rows.index_select(0, batch.rows)
    needs = Needs.of((rows, *head.tensors)) if needs is None else needs
    skips = needs.any or options.metric_rows == "active"
    active = rows_with_gradient(batch, config) if skips else RowsWithGradient(batch)
    return rows, make_plan(rows.dtype, head, batch, config, options, active, needs, main_grad)


def run_plan(rows: Tensor, plan: Plan) -> PolicyLossOutput:
    """Compute the loss of (T, D) rows, as planned or with less memory."""
    parts = loss_parts(rows, plan)
    batch, config, metric_rows = plan.batch, plan.config, plan.options.metric_rows
    metrics = LazyMetrics(
        loss_metrics,
        *parts[3:],
        batch,
        config,
        metric_rows,
        logprobs=parts.logp,
        entropy=parts.entropy,
    )
    return PolicyLossOutput(parts.loss, metrics.ready_for(batch))


def loss_parts(rows: Tensor, plan: Plan) -> LossParts:
    """Return the loss, and the values that metrics are made from."""
    check_same_plan(rows, plan)

    def run(plan: Plan) -> LossParts:
        one = plan.schedule == "one_pass" and plan.needs.any
        parts = (one_pass if one else two_pass)(rows, plan)
        complete = parts.logp.numel() == plan.batch.num_tokens
        if complete or plan.options.metric_rows == "active":
            return parts
        logp, entropy = with_rest(parts.logp, parts.entropy, rows, plan)
        return parts._replace(logp=logp, entropy=entropy)

    return retry_on_oom(run, plan)


def check_same_plan(rows: Tensor, plan: Plan) -> None:
    """Raise on every rank unless all that share the vocabulary have the same plan and rows."""
    what = (plan.config, plan.schedule, plan.chunks, plan.batch.lengths, plan.needs.of_inputs)
    check_ranks_agree(plan.rows(rows), plan.route, *what)


def _check_layout(hidden: Tensor, head: Head, batch: TokenBatch) -> None:
    columns, depth = head.vocab_size, head.weight.shape[1]
    layout = tuple(host.values(batch.layout))
    if tuple(hidden.shape[:-1]) != layout:
        raise ValueError(
            f"hidden: expected shape {(*layout, depth)} (the batch's layout and D), got "
            f"{tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden)
    if batch.max_target is not None:
        check_target_range(0, host.values(batch.max_target), columns)
    else:
        inside = (batch.target < columns).all()
        host.assert_async(inside, f"target: expected ids in [0, {columns})")
    if batch.sampling_mask is not None:
        check_mask_range(batch.sampling_mask.max_id, columns)
