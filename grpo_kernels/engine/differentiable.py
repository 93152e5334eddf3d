"""Differentiable statistics of a head's rows.

The forward saves what its plan says. The backward uses it, or computes the logits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, reference_logprobs
from grpo_kernels.engine.autograd import INPUTS, Forward, HeadCall, Tensors, apply
from grpo_kernels.engine.bounded import saved_gradients, saving_forward
from grpo_kernels.engine.chunked_loop import forward
from grpo_kernels.engine.gradients import recompute_backward
from grpo_kernels.engine.logprobs_plan import NOTHING, LogprobsPlan
from grpo_kernels.engine.retry_on_oom import retry_on_oom
from grpo_kernels.engine.route import Route
from grpo_kernels.engine.rows import Gradients, Rows, selection_without_wait
from grpo_kernels.head import check_plain

DIFFERENTIABLE = ("logprobs", "entropy", "masked_logprobs")


def differentiable_stats(rows: Rows, plan: LogprobsPlan) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows that all have a target, and the tensor saved for the backward.

    :data:`DIFFERENTIABLE` names the statistics with gradients for the hidden states and the head.
    """
    if not plan.route.backend.has_tiles:
        stats = reference_logprobs(
            hidden=rows.hidden,
            head=rows.head,
            target=rows.target,
            precision=plan.precision,
            sampling_mask=rows.sampling_mask,
            outputs=plan.outputs,
        )
        return stats, None
    if not plan.needs.any:
        check_plain(**dict(zip(INPUTS, rows.inputs, strict=True)))
        return rows_forward(rows, plan)
    *stats_of_rows, saved = apply(_StatsCall(rows, plan))
    return RowStats(*stats_of_rows), saved


@dataclass(frozen=True)
class _StatsCall(HeadCall):
    rows: Rows
    plan: LogprobsPlan
    name = "linear_logprobs"

    @property
    def inputs(self) -> Tensors:
        return self.rows.inputs

    @property
    def guarded(self) -> Tensors:
        return self.rows.belongings

    def without_tensors(self) -> _StatsCall:
        return self._with_rows(self.rows.without_inputs())

    def with_tensors(self, inputs: Sequence[Any], guarded: Sequence[Any]) -> _StatsCall:
        return self._with_rows(self.rows.with_inputs(*inputs))

    def _with_rows(self, rows: Rows) -> _StatsCall:
        return _StatsCall(rows, replace(self.plan, head=rows.head))

    def forward(self) -> Forward:
        stats, saved = rows_forward(self.rows, self.plan)
        constants = [x for name, x in stats._asdict().items() if name not in DIFFERENTIABLE]
        return Forward((*stats, saved), [*constants, saved], (saved, *stats.for_backward))

    def backward(
        self, saved: Sequence[Any], gradients: Gradients | None, grad_outputs: Sequence[Any]
    ) -> Gradients:
        of_forward, *stats = saved
        grads = RowStats(*map(contiguous, grad_outputs[:-1]))  # type: ignore[arg-type]
        grad_stats = StatsGrad(grads.logprobs, grads.entropy, grads.masked_logprobs)
        return stats_backward(
            rows=self.rows,
            stats=RowStats(*stats),
            grad_stats=grad_stats,
            plan=self.plan,
            saved=of_forward,
        )


def contiguous(gradient: Tensor | None) -> Tensor | None:
    """Return a contiguous gradient; None for None, and for the gradient of an empty output."""
    return None if gradient is None or not gradient.numel() else gradient.contiguous()


def rows_forward(rows: Rows, plan: LogprobsPlan) -> tuple[RowStats, Tensor | None]:
    """Compute the statistics of rows that all have a target, and the tensor saved for the backward.

    After an out-of-memory error, smaller tiles are tried.
    """

    def run(route: Route) -> tuple[RowStats, Tensor | None]:
        if plan.saved.kind == NOTHING:
            return forward(rows, route, plan.outputs), None
        return saving_forward(rows, route, plan.outputs, plan.saved)

    with torch.no_grad():
        return retry_on_oom(run, plan.forward_route)


def stats_backward(
    rows: Rows,
    stats: RowStats,
    grad_stats: StatsGrad,
    plan: LogprobsPlan,
    saved: Tensor | None,
) -> Gradients:
    """Compute gradients, in fp32 or the hidden states' dtype, from the gradients of the statistics
    and the tensor that :func:`rows_forward` saved."""
    if saved is not None and _is_of_logprobs_only(grad_stats, plan):
        return saved_gradients(
            kind=plan.saved.kind,
            saved=saved,
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=plan.route,
            needs=plan.needs,
            weight_grad=plan.weight_grad,
        )
    selection = selection_without_wait(grad_stats.nonzero)

    def run(route: Route) -> Gradients:
        return recompute_backward(
            rows=rows,
            stats=stats,
            grad_stats=grad_stats,
            route=route,
            needs=plan.needs,
            weight_grad=plan.weight_grad,
            selection=selection,
        )

    not_retryable = plan.weight_grad.main_grad is not None
    return retry_on_oom(run, plan.route.tiled(), not_retryable=not_retryable)


def _is_of_logprobs_only(grad_stats: StatsGrad, plan: LogprobsPlan) -> bool:
    """Return whether only the log-probabilities for which a tensor was saved have a gradient."""
    if plan.masked:
        return grad_stats.dmasked is not None and grad_stats._replace(dmasked=None).nonzero is None
    return grad_stats.dlogp is not None and grad_stats._replace(dlogp=None).nonzero is None
