"""linear_policy_loss: hidden states and the LM-head weight in, policy loss and gradients out."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from grpo_kernels.batch import TokenBatch
from grpo_kernels.logprob.check import check_device, check_target_range, prepare_head
from grpo_kernels.logprob.dispatch import BACKENDS
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.op import linear_logprobs
from grpo_kernels.logprob.rows import RowStats, Transform
from grpo_kernels.logprob.schedule import (
    Execution,
    Gradients,
    Needs,
    forward_backward,
    fp16_gradient_scale,
)
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, Stat, policy_loss
from grpo_kernels.losses.policy_loss import check_loss_inputs
from grpo_kernels.losses.weights import Weights, static_weights
from grpo_kernels.middle import make_middle
from grpo_kernels.plan import HeadSettings, Plan, make_plan


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    schedule: str = "auto",
    max_workspace_bytes: int | None = None,
) -> PolicyLossOutput:
    """The policy loss of a linear head and its gradients, without the (tokens, vocabulary) logits.

    Args:
        hidden: (B, L, D) or (T, D) last hidden states, laid out as ``batch`` was built; row t is
            the state that predicts ``target[t]``.
        weight: (V, D) LM-head weight; no work is spent on its gradient when it is frozen.
        batch: the tokens that carry the loss. Other rows of ``hidden`` enter no product.
        config: the loss; ``config.temperature`` divides the logits.
        bias: (V,) or None.
        logit_scale, softcap: as in :func:`grpo_kernels.linear_logprobs`.
        precision: ``"fp32"`` (exact) or ``"input"``, as in ``linear_logprobs``.
        backend: a name of ``available_backends()`` or ``"auto"``.
        schedule: ``"one_pass"`` (gradients in the forward, three products), ``"two_pass"``
            (recompute, four) or ``"auto"``.
        max_workspace_bytes: bound on the logits tile; None: the backend's default.

    Returns:
        :class:`PolicyLossOutput`; the loss can be scaled and differentiated more than once, but not
        twice in a row (no second derivatives).

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
    """
    settings = HeadSettings(
        precision=precision,
        backend=backend,
        schedule=schedule,
        max_workspace_bytes=max_workspace_bytes,
    )
    check_loss_inputs(batch, config)
    transform = Transform(float(logit_scale), softcap, config.temperature)
    hidden, head = prepare_head(hidden, weight, bias, transform, precision)
    _check_layout(hidden, weight, batch)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if batch.rows is not None:
        rows = rows.index_select(0, batch.rows)
    needs = _needs(rows, head)
    keep = _rows_with_gradient(batch, config) if needs.any else None
    active = batch if keep is None else batch.select(keep)
    plan = make_plan(rows, weight, active, config, settings)
    call = _Call(head, batch, config, plan, settings, keep, active)
    if plan.schedule == "one_pass" and needs.any:
        loss, metrics = _one_pass(rows, call, needs)
    else:
        loss, metrics = _two_pass(rows, call)
    return PolicyLossOutput(loss, _with_skipped(metrics, active, batch))


class FusedLinearGRPOLoss(nn.Module):
    """Module form of :func:`linear_policy_loss`.

    Keyword arguments are :class:`LossConfig`'s, and ``logit_scale``, ``softcap``, ``precision``,
    ``backend``, ``schedule`` and ``max_workspace_bytes``.

    Example:
        >>> loss_fn = FusedLinearGRPOLoss(loss_type="dapo", beta=0.04)
        >>> loss, metrics = loss_fn(hidden, lm_head.weight, completion_ids, advantages, mask,
        ...                         ref_logprobs=ref_logprobs)
        >>> loss.backward()
    """

    def __init__(
        self,
        *,
        logit_scale: float = 1.0,
        softcap: float | None = None,
        precision: str = "fp32",
        backend: str = "auto",
        schedule: str = "auto",
        max_workspace_bytes: int | None = None,
        **loss: object,
    ) -> None:
        super().__init__()
        unknown = sorted(set(loss) - set(LossConfig.__dataclass_fields__))
        if unknown:
            known = ", ".join(LossConfig.__dataclass_fields__)
            raise ValueError(f"{unknown[0]}: expected a field of LossConfig ({known})")
        self.config = LossConfig(**loss)  # type: ignore[arg-type]
        self._options = dict(
            logit_scale=logit_scale,
            softcap=softcap,
            precision=precision,
            backend=backend,
            schedule=schedule,
            max_workspace_bytes=max_workspace_bytes,
        )

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
        **batch: object,
    ) -> PolicyLossOutput:
        """Padded: hidden (B, L, D), target (B, L); packed: (T, D), (T,), ``cu_seqlens`` (B + 1,).

        ``advantages``, ``mask`` and the further keyword arguments (``old_logprobs``,
        ``ref_logprobs``, ``rollout_logprobs``, ``num_items_in_batch``,
        ``gradient_accumulation_steps``) are those of :meth:`TokenBatch.from_padded` and
        :meth:`TokenBatch.from_packed`.
        """
        if cu_seqlens is None:
            tokens = TokenBatch.from_padded(target, advantages, mask, **batch)  # type: ignore[arg-type]
        else:
            tokens = TokenBatch.from_packed(target, advantages, cu_seqlens, mask, **batch)  # type: ignore[arg-type]
        return linear_policy_loss(hidden, weight, tokens, self.config, bias=bias, **self._options)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"{self.config}, " + ", ".join(f"{k}={v!r}" for k, v in self._options.items())


class _Needs(NamedTuple):
    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


class _Call(NamedTuple):
    """One call of the op, decided."""

    head: Head
    batch: TokenBatch  # every valid token
    config: LossConfig
    plan: Plan
    settings: HeadSettings
    keep: Tensor | None  # index of the rows with a gradient, None: all
    active: TokenBatch  # those rows


def _check_layout(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> None:
    if tuple(hidden.shape[:-1]) != batch.layout:
        raise ValueError(
            f"hidden: expected shape {(*batch.layout, weight.shape[1])} (the batch's layout and D)"
            f", got {tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden)
    check_target_range(0, batch.max_target, weight.shape[0])


def _needs(rows: Tensor, head: Head) -> _Needs:
    tensors = (rows, head.weight, head.bias)
    enabled = torch.is_grad_enabled()
    return _Needs(*(enabled and x is not None and x.requires_grad for x in tensors))


def _rows_with_gradient(batch: TokenBatch, config: LossConfig) -> Tensor | None:
    """Index of the rows that can have a gradient; None when all do. One host transfer."""
    if config.beta != 0 or config.entropy_coef != 0:
        return None
    if not config.surrogate.vanishes_at_zero_advantage:
        return None
    nonzero = batch.advantages != 0
    if config.scope(batch.rollout_logprobs is not None) != "token":
        # one token's advantage reaches every log-probability of its sequence
        nonzero = batch.expand(batch.segment_sum(nonzero.double())) > 0
    keep = nonzero.nonzero().squeeze(-1)
    return None if keep.numel() == batch.num_tokens else keep


def _one_pass(rows: Tensor, call: _Call, needs: _Needs) -> tuple[Tensor, Metrics]:
    """Gradients are computed in the forward, while each chunk's logits are there."""
    loss, metrics = _OnePass.apply(rows, call.head.weight, call.head.bias, call, needs)
    return loss, metrics


class _OnePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weight, bias, call: _Call, needs: _Needs):
        stats, gradients = _active_pass(rows, call, needs)
        logp, entropy = _with_inactive(rows, call, stats)
        loss, metrics = policy_loss(logp, call.batch, call.config, entropy)
        ctx.gradients = gradients
        ctx.call, ctx.needs = call, needs
        ctx.save_for_backward(rows, weight, bias)
        return loss, metrics

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss, dmetrics):
        inputs = ctx.saved_tensors
        # the first backward takes the gradients over, so that the largest is never copied; a
        # second one, under retain_graph, computes them again
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            _, gradients = _active_pass(inputs[0], ctx.call, ctx.needs)
        dhidden, dweight, dbias = (
            _scaled_(gradient, dloss, x.dtype) if gradient is not None else None
            for gradient, x in zip(gradients, inputs, strict=True)
        )
        keep = ctx.call.keep
        if dhidden is not None and keep is not None:
            dhidden = dhidden.new_zeros(inputs[0].shape).index_copy(0, keep, dhidden)
        return dhidden, dweight, dbias, None, None


def _scaled_(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``gradient * scale`` in ``dtype``, in place where the dtype allows."""
    if gradient.dtype != dtype:
        return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
    if scale.device.type == "cpu" and scale.item() == 1:  # no sync, and a pass saved
        return gradient
    return gradient.mul_(scale)


def _active_pass(rows: Tensor, call: _Call, needs: _Needs) -> tuple[RowStats, Gradients]:
    """The rows with a gradient: logits, statistics, middle stage and products, chunk by chunk."""
    batch, config = call.active, call.config
    weights = static_weights(call.batch, config)
    if call.keep is not None:
        rows = rows[call.keep]
        weights = Weights(*(weight[call.keep] for weight in weights))
    kernels = BACKENDS[call.plan.backend].kernels
    assert kernels is not None  # the reference never gets here
    return forward_backward(
        rows,
        call.head,
        batch.target,
        Execution(kernels(), call.plan.chunks, call.plan.precision),
        make_middle(batch, weights, config, call.plan.printed_middle),
        Needs(*needs),
        fp16_gradient_scale(rows, _largest_coefficient(batch, weights, config)),
    )


def _largest_coefficient(batch: TokenBatch, weights: Weights, config: LossConfig) -> Tensor:
    """About the largest ``dL/dlogp`` or ``dL/dentropy`` at ratio 1, a () tensor."""
    largest = weights.policy * (batch.advantages.abs() + config.beta)
    largest = largest + abs(config.entropy_coef) * weights.entropy
    if largest.numel() == 0:
        return largest.new_ones(())
    return torch.where(largest.amax() > 0, largest.amax(), 1.0)


def _with_inactive(rows: Tensor, call: _Call, stats: RowStats) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy of all rows; those without gradient run forward only."""
    if call.keep is None:
        return stats.logp, stats.entropy
    rest = torch.ones_like(call.batch.target, dtype=torch.bool)
    rest = rest.index_fill(0, call.keep, False).nonzero().squeeze(-1)
    others = _logprobs(rows[rest], call.batch.target[rest], call)
    empty = stats.logp.new_empty(call.batch.num_tokens)
    logp = empty.index_copy(0, call.keep, stats.logp).index_copy(0, rest, others[0])
    entropy = empty.index_copy(0, call.keep, stats.entropy).index_copy(0, rest, others[1])
    return logp, entropy


def _two_pass(rows: Tensor, call: _Call) -> tuple[Tensor, Metrics]:
    """Log-probabilities, loss in torch, and a backward that recomputes the logits."""
    if call.keep is None:
        logp, entropy = _logprobs(rows, call.batch.target, call)
    else:
        kept = _logprobs(rows[call.keep], call.active.target, call)
        with torch.no_grad():
            stats = RowStats(kept[0].detach(), kept[1].detach(), kept[0])
            logp, entropy = _with_inactive(rows, call, stats)
        logp = logp.index_copy(0, call.keep, kept[0])
        entropy = entropy.index_copy(0, call.keep, kept[1])
    return policy_loss(logp, call.batch, call.config, entropy)


def _logprobs(rows: Tensor, target: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
    transform = call.head.transform
    with torch.autocast(rows.device.type, enabled=False):
        weight = call.head.weight.to(rows.dtype)
        out = linear_logprobs(
            rows,
            weight,
            target,
            bias=call.head.bias,
            temperature=transform.temperature,
            logit_scale=transform.logit_scale,
            softcap=transform.softcap,
            outputs=("logprobs", "entropy"),
            precision=call.plan.precision,
            backend=call.plan.backend,
            max_workspace_bytes=call.settings.max_workspace_bytes,
        )
    assert out.logprobs is not None and out.entropy is not None
    return out.logprobs, out.entropy


def _with_skipped(metrics: Metrics, active: TokenBatch, batch: TokenBatch) -> Metrics:
    """Adds the share of the caller's rows that got no backward."""
    total = 1
    for size in batch.layout:
        total *= size
    device = batch.target.device
    skipped = torch.full((), total - active.num_tokens, dtype=torch.float64, device=device)
    count = torch.full((), total, dtype=torch.float64, device=device)
    return Metrics({**metrics.stats, "frac_rows_skipped": Stat("mean", skipped, count)})
