"""One pass: gradients are computed in the forward, while each chunk's logits are there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats
from grpo_kernels.batch import host
from grpo_kernels.engine import (
    INPUTS,
    BoundedSums,
    Gradients,
    GradientSums,
    chunked_loop,
    retry_on_oom,
)
from grpo_kernels.head import check_plain, first_derivative_only, stats_dtype
from grpo_kernels.losses import static_weights
from grpo_kernels.schedule.loss_metrics import LossParts
from grpo_kernels.schedule.loss_plan import Plan


def one_pass(hidden: Tensor, plan: Plan) -> LossParts:
    """Compute the loss of (T, D) hidden states; three GEMMs, backward included."""
    check_plain(**dict(zip(INPUTS, (hidden, *plan.head.tensors), strict=True)))
    return LossParts(*_OnePass.apply(plan, hidden, *plan.head.tensors))


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, hidden: Tensor, *head: Tensor | None) -> Any:
        found = _swept(hidden, plan)
        ctx.found, ctx.plan, ctx.result_of = found, plan, "linear_policy_loss"
        # the batch, too: autograd then refuses a backward after a change in place
        ctx.save_for_backward(hidden, *head, *plan.batch.tensors())
        others = (found.logp, found.stats.entropy, found.report)
        ctx.mark_non_differentiable(*(x for x in others if x is not None))
        ctx.set_materialize_grads(False)  # their zeros would only be dropped
        return found.loss, found.logp, found.stats.entropy, None, found.report

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, saved: Any, dloss: Tensor, *others: Tensor) -> Any:
        inputs, plan = saved[: len(Gradients._fields)], ctx.plan
        # the first backward takes the gradients over, so that the largest is never copied; a
        # second one, under retain_graph, computes them again
        found, ctx.found = ctx.found, None
        if found is None:
            plan = replace(plan, head=plan.head.with_tensors(*inputs[1:]))
            run = lambda plan: _swept(inputs[0], plan)  # noqa: E731
            plan = replace(plan, options=replace(plan.options, schedule="one_pass"))
            found = retry_on_oom(run, plan)
        gradients = found.gradients
        if plan.main_grad is not None:
            plan.main_grad.addcmul_(gradients.weight, dloss.to(gradients.weight.dtype))
            gradients = gradients._replace(weight=None)
        unit = host.reading_is_free(dloss) and dloss.item() == 1  # no sync, and a pass saved

        def scaled(gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            if gradient is None or unit:
                return None if gradient is None else gradient.to(dtype)
            return _scaled_(gradient, dloss, dtype)

        pairs = zip(gradients, inputs, strict=True)
        dhidden, *rest = (scaled(g, torch.float32 if x is None else x.dtype) for g, x in pairs)
        index = plan.active.index
        if dhidden is not None and index is not None:
            dhidden = dhidden.new_zeros(inputs[0].shape).index_copy(0, index, dhidden)
        return None, dhidden, *rest


def _scaled_(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``gradient * scale``, rounded once to ``dtype``; the gradient is used up."""
    if gradient.dtype == dtype or gradient.device.type == "cpu":  # which would take a copy
        return gradient.mul_(scale).to(dtype)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def one_pass_gradients(hidden: Tensor, plan: Plan) -> tuple[LossParts, Gradients]:
    """Compute the same loss with its gradients, without autograd.

    The gradient of the hidden states is that of the rows with one.
    """
    found = _swept(hidden, plan)
    logp, entropy = found.logp, found.stats.entropy
    return LossParts(found.loss, logp, entropy, None, found.report), found.gradients


class _Swept(NamedTuple):
    """The results of one pass over the rows with a gradient."""

    loss: Tensor
    stats: RowStats
    gradients: Gradients
    report: Tensor | None  # of a bounded backward

    @property
    def logp(self) -> Tensor:
        """The policy's log-probabilities: renormalised where the batch has a sampling mask."""
        stats = self.stats
        return stats.logp if stats.masked_logp is None else stats.masked_logp


def _swept(hidden: Tensor, plan: Plan) -> _Swept:
    """Sweep the rows with a gradient: logits, statistics, loss and gradients, chunk by chunk."""
    active, batch = plan.active, plan.active.batch
    dtype = stats_dtype(hidden.dtype)
    weights = active.take_weights(static_weights(plan.batch, plan.config, dtype))
    stage = plan.stage(batch, weights, plan.config, dtype)
    needs = replace(plan.needs, wide=True) if plan.main_grad is not None else plan.needs
    rows, chunks = plan.rows(hidden), plan.chunks
    total: GradientSums | BoundedSums = GradientSums(rows, needs, len(chunks))
    if plan.options.bounded is not None:
        total = BoundedSums(rows, needs, len(chunks), plan.route)
    stats, gradients = chunked_loop(
        rows, plan.route, chunks, stage=stage, sums=total, reads_once=plan.reads_once
    )
    report = total.report if isinstance(total, BoundedSums) else None
    return _Swept(stage.loss(), stats, gradients, report)
