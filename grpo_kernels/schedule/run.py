"""From a call to its plan, and from the plan to a differentiable loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from grpo_kernels.batch import TokenBatch, host
from grpo_kernels.common import check_device
from grpo_kernels.engine import (
    Forward,
    Gradients,
    HeadCall,
    Needs,
    RunOptions,
    Tensors,
    WeightGrad,
    apply,
    check_ranks_agree,
    retry_on_oom,
    scaled_,
)
from grpo_kernels.head import (
    Head,
    check_local,
    check_mask_range,
    check_target_range,
    checked_head,
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
    with_other_rows,
)
from grpo_kernels.schedule.rows_with_gradient import RowsWithGradient, rows_with_gradient

Result = TypeVar("Result")


def make_call(
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Plan]:
    """Check a call and plan it; return (N, D) hidden states at all positions, and the plan.

    Raises:
        ValueError: an argument is wrong, or the requested call cannot run.
    """
    check_loss_inputs(batch, config)
    weight = head.weight
    hidden, head = checked_head(hidden, head, options.precision)
    if main_grad is not None:
        main_grad = _checked_main_grad(main_grad, weight, hidden, head.weight.shape[0])
    return planned_rows(
        hidden=hidden,
        head=head,
        batch=batch,
        config=config,
        options=options,
        needs=Needs.of((hidden, *head.tensors)),
        weight_grad=WeightGrad(main_grad),
    )


def planned_rows(
    *,
    hidden: Tensor,
    head: Head,
    batch: TokenBatch,
    config: LossConfig,
    options: RunOptions,
    needs: Needs,
    weight_grad: WeightGrad = WeightGrad(),  # noqa: B008
) -> tuple[Tensor, Plan]:
    """Plan a call with a checked head that computes the gradients in ``needs``."""
    _check_layout(hidden, head, batch)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    active = RowsWithGradient(batch)
    if needs.any or options.metric_rows == "active":
        active = rows_with_gradient(batch, config)
    plan = make_plan(
        dtype=hidden.dtype,
        head=head,
        batch=batch,
        config=config,
        options=options,
        active=active,
        needs=needs,
        weight_grad=weight_grad,
    )
    return hidden, plan


def run_plan(hidden: Tensor, plan: Plan) -> PolicyLossOutput:
    """Compute the loss from (N, D) hidden states, as planned or, if need be, with less memory."""
    check_same_plan(plan)
    parts = checked_targets(
        lambda: retry_on_oom(lambda plan: _loss_parts(hidden, plan), plan), plan
    )
    made = partial(loss_metrics, *parts[1:], plan.batch, plan.config, plan.options.metric_rows)
    metrics = Metrics(made, parts.logprobs, parts.entropy)
    return PolicyLossOutput(parts.loss, metrics.ready_for(plan.batch))


def checked_targets(run: Callable[[], Result], plan: Plan) -> Result:
    """Return the result of ``run``; check targets that the host does not know on the device.

    The assertion comes first, or after ``run`` if the first launch is a GEMM: its kernels do not
    access memory for a target outside the vocabulary.
    """
    if plan.batch.max_target is not None:
        return run()

    def check() -> None:
        columns = plan.head.vocab_size
        inside = (plan.batch.target < columns).all()
        host.assert_async(inside, f"target: expected ids in [0, {columns})")

    if not plan.route.exponentials:
        check()
    result = run()
    if plan.route.exponentials:
        check()
    return result


def _loss_parts(hidden: Tensor, plan: Plan) -> LossParts:
    if plan.needs.any and plan.route.backend.has_tiles:
        parts = LossParts(*apply(_LossCall(hidden, plan)))
    else:
        parts = eager_loss(hidden, plan)
    if plan.options.metric_rows == "active":
        return parts
    logprobs, entropy = with_other_rows(parts.logprobs, parts.entropy, hidden, plan)
    return parts._replace(logprobs=logprobs, entropy=entropy)


@dataclass(frozen=True)
class _LossCall(HeadCall):
    hidden: Any  # (N, D) tensor; None while autograd holds it
    plan: Plan
    name = "linear_policy_loss"

    @property
    def inputs(self) -> Tensors:
        return (self.hidden, *self.plan.head.tensors)

    @property
    def guarded(self) -> Tensors:
        return self.plan.batch.tensors()

    def without_tensors(self) -> _LossCall:
        plan = replace(self.plan, head=self.plan.head.without_tensors())
        return _LossCall(None, plan)

    def with_tensors(self, inputs: Sequence[Any], guarded: Sequence[Any]) -> _LossCall:
        hidden, *of_head = inputs
        return _LossCall(hidden, replace(self.plan, head=self.plan.head.with_tensors(*of_head)))

    def forward(self) -> Forward:
        parts, gradients, saved = loss_forward(self.hidden, self.plan)
        return Forward(tuple(parts), parts[1:], saved, gradients)

    def backward(
        self, saved: Sequence[Any], gradients: Gradients | None, grad_outputs: Sequence[Any]
    ) -> Gradients:
        hidden = self.hidden
        plan = self.plan
        dloss = grad_outputs[0]
        if plan.schedule == "two_pass" or plan.keeps:
            gradients = loss_backward(hidden, plan, tuple(saved), dloss)
        else:
            if gradients is None:  # a second backward, with retain_graph
                gradients = self._gradients_again()
            main_grad = plan.weight_grad.main_grad
            if main_grad is not None:
                assert gradients.weight is not None
                scale = dloss.to(gradients.weight.dtype)
                main_grad.addcmul_(gradients.weight, scale)
                gradients = gradients._replace(weight=None)
            gradients = scaled_(gradients, dloss, self.inputs, plan.route.backend)
        if gradients.hidden is None:
            return gradients
        dhidden = gradients.hidden.to(hidden.dtype)
        return gradients._replace(hidden=at_all_positions(dhidden, hidden, plan))

    def _gradients_again(self) -> Gradients:
        options = replace(self.plan.options, schedule="one_pass")
        plan = replace(self.plan, route=replace(self.plan.route, options=options))
        gradients = retry_on_oom(lambda plan: loss_forward(self.hidden, plan).gradients, plan)
        assert gradients is not None
        return gradients


def at_all_positions(dhidden: Tensor, hidden: Tensor, plan: Plan) -> Tensor:
    """Return the (N, D) gradient of ``hidden`` from the gradient of the active rows."""
    positions = plan.active.batch.rows
    if positions is None:
        return dhidden
    return dhidden.new_zeros(hidden.shape).index_copy_(0, positions, dhidden)


def check_same_plan(plan: Plan) -> None:
    """Raise on all ranks that share the vocabulary unless they have the same plan and targets."""
    if plan.head.shard is not None:
        facts = (plan.config, plan.schedule, plan.chunks, plan.batch.lengths, plan.needs.of_inputs)
        check_ranks_agree(plan.active.batch.target, plan.head, plan.route, facts)


def _check_layout(hidden: Tensor, head: Head, batch: TokenBatch) -> None:
    columns, depth = head.vocab_size, head.weight.shape[1]
    layout = tuple(host.values(batch.layout))
    if tuple(hidden.shape[:-1]) != layout:
        raise ValueError(
            f"hidden: expected shape {(*layout, depth)} (the batch's layout and D: one row for "
            f"each predicted token), got {tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden.device)
    if batch.max_target is not None:
        check_target_range(0, host.values(batch.max_target), columns)
    if batch.sampling_mask is not None:
        check_mask_range(batch.sampling_mask.max_id, columns)


def _checked_main_grad(buffer: Tensor, weight: Tensor, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the rows of the caller's buffer for ids in use, without padding.

    Raises:
        ValueError: the buffer does not match the weight, or nothing would be added to it.
    """
    if not isinstance(buffer, Tensor):
        raise ValueError(f"main_grad: expected a tensor, got {type(buffer).__name__}")
    check_local("main_grad", buffer)
    if not weight.requires_grad:
        raise ValueError("main_grad: expected None for a weight with requires_grad=False")
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
        raise ValueError("main_grad: expected requires_grad=False")
    if buffer.data_ptr() == weight.data_ptr() and buffer.numel():
        raise ValueError("main_grad: expected a buffer other than the weight, got the weight")
    return buffer[:vocab_size]
