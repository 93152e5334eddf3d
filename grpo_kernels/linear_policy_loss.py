"""linear_policy_loss: hidden states and the LM-head weight in, policy loss and gradients out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import grpo_kernels.batch.host as host
from grpo_kernels.backends.base import Transform
from grpo_kernels.backends.registry import REFERENCE
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.engine.retry import SPOILED_SUM, first_that_fits
from grpo_kernels.engine.sweep import Needs
from grpo_kernels.head.checks import (
    check_device,
    check_mask_range,
    check_target_range,
    prepare_head,
)
from grpo_kernels.head.head import Head
from grpo_kernels.head.lora import HeadLoRA
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, Stat
from grpo_kernels.losses.policy_loss import check_loss_inputs
from grpo_kernels.schedule.active import ActiveRows, active_rows
from grpo_kernels.schedule.compile_op import Inputs, Settings, compiled_policy_loss
from grpo_kernels.schedule.fallback import Way, ways
from grpo_kernels.schedule.main_grad import weight_grad_of
from grpo_kernels.schedule.plan import HeadSettings, make_plan
from grpo_kernels.schedule.schedules import Call, one_pass, two_pass


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    schedule: str = "auto",
    max_workspace_bytes: int | None = None,
    batch_invariant: bool = False,
    metrics: str = "all",
    weight_grad: Tensor | None = None,
    gradient_scale: float | None = None,
) -> PolicyLossOutput:
    """The policy loss of a linear head and its gradients, without the (tokens, vocabulary) logits.

    Args:
        hidden: (B, L, D) or (T, D) last hidden states, laid out as ``batch`` was built; row t is
            the state that predicts ``target[t]``.
        weight: (V, D) LM-head weight; no work is spent on its gradient when it is frozen.
        batch: the tokens that carry the loss. Other rows of ``hidden`` enter no product.
        config: the loss; ``config.temperature`` divides the logits.
        bias: (V,) or None.
        lora: an adapter of the head, whose factors get gradients; no (V, D) tensor is made of it.
        logit_scale, softcap: as in :func:`grpo_kernels.linear_logprobs`.
        precision: ``"fp32"`` (exact), ``"input"`` or ``"tf32"``, as in ``linear_logprobs``.
        backend: a name of ``available_backends()`` or ``"auto"``.
        schedule: ``"one_pass"`` (gradients in the forward, three products), ``"two_pass"``
            (recompute, four) or ``"auto"``: the one that a model of both, fitted to measurements,
            predicts to be faster, unless it does not fit into the memory that is free.
        max_workspace_bytes: bound on the logits tile, of both schedules; None: the backend's
            default. Out of memory, a call is repeated with a smaller one, and warns.
        batch_invariant: a row's log-probability and entropy have the bits that ``linear_logprobs``
            gives them in this mode, whatever the batch: on-policy, the log-ratio is exactly 0. It
            may cost the fourth product, which ``explain`` says.
        metrics: what is measured on rows without gradient, those of zero advantage in a loss
            without KL penalty and entropy bonus. ``"all"``: they take the forward, and metrics are
            over all tokens of ``batch``. ``"active"``: they are not computed, and metrics are over
            the rows with a gradient, and over the sequences that have one. (A loss in which
            advantages act on whole sequences sets whole sequences aside.) The loss and its
            gradients are the same.
        weight_grad: (V, D) fp32 (fp64 for fp64 hidden states), a buffer such as ``main_grad`` or an
            existing ``weight.grad``: each backward adds the weight's gradient to it, and autograd
            gets none, so nothing that waits for it (a hook, DDP) hears of it. In two_pass no
            further (V, D) tensor exists; in one_pass an fp32 one, from the forward to the backward.
        gradient_scale: with ``weight_grad``, the number that the loss will be multiplied with
            before ``backward()``: 1.0, or a ``GradScaler``'s scale. In one_pass the forward then
            adds to ``weight_grad`` itself, and no further (V, D) tensor exists. So a backward must
            follow each forward, with this factor (a ValueError, on a GPU a device assertion), and
            activation checkpointing, which repeats the forward, must not go around it.

    Returns:
        :class:`PolicyLossOutput`; the loss can be scaled and differentiated more than once, but not
        twice in a row (no second derivatives).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
    """
    into = weight_grad_of(weight_grad, gradient_scale, weight, hidden)
    if torch.compiler.is_compiling():
        factors = (None, None, 1.0) if lora is None else (lora.a, lora.b, lora.scaling)
        options = Settings(
            factors[2], logit_scale, softcap, precision, backend, schedule, max_workspace_bytes,
            batch_invariant, metrics,
        )  # fmt: skip
        inputs = Inputs(hidden, weight, bias, *factors[:2])
        return compiled_policy_loss(inputs, batch, config, options)
    settings = HeadSettings(
        precision=precision,
        backend=backend,
        schedule=schedule,
        max_workspace_bytes=max_workspace_bytes,
        batch_invariant=batch_invariant,
        metrics=metrics,
    )
    check_loss_inputs(batch, config)
    transform = Transform(logit_scale, softcap, config.temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision, lora)
    _check_layout(hidden, weight, batch)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if batch.rows is not None:
        rows = rows.index_select(0, batch.rows)
    needs = _needs(rows, head)
    measured = settings.metrics == "all"
    active = active_rows(batch, config) if needs.any or not measured else ActiveRows(batch)
    waiting = active.waiting if measured else 0

    def run(way: Way) -> tuple[Tensor, Metrics]:
        if into is not None and way.plan.backend == REFERENCE:
            raise ValueError("weight_grad: expected None with the eager reference, got a buffer")
        call = Call(head, batch, config, way.plan, way.settings, active, into)
        if way.plan.schedule == "one_pass" and needs.any:
            return one_pass(rows, call, needs)
        return two_pass(rows, call)

    loss, found = first_that_fits(
        run,
        ways(settings, lambda x: make_plan(rows, head, active.batch, config, x, waiting)),
        lambda way: way.advice,
        lambda way: SPOILED_SUM if into is not None and into.filled_by(way.plan.schedule) else None,
    )
    if into is not None:
        into.watch(loss)
    return PolicyLossOutput(loss, _with_skipped(found, active.batch, batch))


_HEAD_OPTIONS = ("logit_scale", "softcap", *HeadSettings.__dataclass_fields__)


class FusedLinearGRPOLoss(nn.Module):
    """Module form of :func:`linear_policy_loss`.

    Keyword arguments are :class:`LossConfig`'s, and ``logit_scale``, ``softcap``, ``precision``,
    ``backend``, ``schedule``, ``max_workspace_bytes``, ``batch_invariant`` and ``metrics``.

    Example:
        >>> loss_fn = FusedLinearGRPOLoss(loss_type="dapo", beta=0.04)
        >>> loss, metrics = loss_fn(hidden, lm_head.weight, completion_ids, advantages, mask,
        ...                         ref_logprobs=ref_logprobs)
        >>> loss.backward()
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        loss_fields, head_fields = set(LossConfig.__dataclass_fields__), set(_HEAD_OPTIONS)
        unknown = sorted(set(options) - loss_fields - head_fields)
        if unknown:
            known = ", ".join([*LossConfig.__dataclass_fields__, *_HEAD_OPTIONS])
            raise ValueError(
                f"{unknown[0]}: expected a field of LossConfig or of the head: {known}"
            )
        self.config = LossConfig(**{k: v for k, v in options.items() if k in loss_fields})
        self._head = {k: v for k, v in options.items() if k in head_fields}

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        bias: Tensor | None = None,
        lora: HeadLoRA | None = None,
        weight_grad: Tensor | None = None,
        gradient_scale: float | None = None,
        **batch: object,
    ) -> PolicyLossOutput:
        """Padded: hidden (B, L, D), target (B, L); packed: (T, D), (T,), ``cu_seqlens`` (B + 1,).

        ``advantages``, ``mask`` and the further keyword arguments (``old_logprobs``,
        ``ref_logprobs``, ``rollout_logprobs``, ``sampling_mask``, ``num_items_in_batch``, ...) are
        those of :meth:`TokenBatch.from_padded` and :meth:`TokenBatch.from_packed`.
        """
        if cu_seqlens is None:
            tokens = TokenBatch.from_padded(target, advantages, mask, **batch)  # type: ignore[arg-type]
        else:
            tokens = TokenBatch.from_packed(target, advantages, cu_seqlens, mask, **batch)  # type: ignore[arg-type]
        return linear_policy_loss(
            hidden,
            weight,
            tokens,
            self.config,
            bias=bias,
            lora=lora,
            weight_grad=weight_grad,
            gradient_scale=gradient_scale,
            **self._head,
        )

    def extra_repr(self) -> str:
        return f"{self.config}, " + ", ".join(f"{k}={v!r}" for k, v in self._head.items())


def _check_layout(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> None:
    if tuple(hidden.shape[:-1]) != batch.layout:
        raise ValueError(
            f"hidden: expected shape {(*batch.layout, weight.shape[1])} (the batch's layout and D)"
            f", got {tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden)
    if batch.max_target is not None:
        check_target_range(0, batch.max_target, weight.shape[0])
    else:
        inside = (batch.target < weight.shape[0]).all()
        host.require(inside, f"target: expected ids in [0, {weight.shape[0]})")
    if batch.sampling_mask is not None:
        check_mask_range(batch.sampling_mask.max_id, weight.shape[0])


def _needs(rows: Tensor, head: Head) -> Needs:
    tensors = (rows, head.weight, head.bias, *head.factors)
    enabled = torch.is_grad_enabled()
    hidden, weight, bias, a, b = (enabled and x is not None and x.requires_grad for x in tensors)
    return Needs(hidden, weight, bias, a, b)


def _with_skipped(metrics: Metrics, active: TokenBatch, batch: TokenBatch) -> Metrics:
    """Adds the share of the caller's rows that got no backward."""
    total, device = math.prod(batch.layout), batch.target.device
    skipped = torch.full((), total - active.num_tokens, dtype=torch.float64, device=device)
    count = torch.full((), total, dtype=torch.float64, device=device)
    return Metrics({**metrics.stats, "frac_rows_skipped": Stat("mean", skipped, count)})
