"""linear_policy_loss: hidden states and the LM-head weight in, policy loss and gradients out."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.batch import TokenBatch
from grpo_kernels.logprob.check import (
    check_device,
    check_kept_range,
    check_target_range,
    prepare_head,
)
from grpo_kernels.logprob.head import Head
from grpo_kernels.logprob.rows import Transform
from grpo_kernels.logprob.schedule import Needs
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, Stat
from grpo_kernels.losses.policy_loss import check_loss_inputs
from grpo_kernels.plan import HeadSettings, make_plan
from grpo_kernels.schedules import Call, one_pass, two_pass


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
    batch_invariant: bool = False,
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
        precision: ``"fp32"`` (exact), ``"input"`` or ``"tf32"``, as in ``linear_logprobs``.
        backend: a name of ``available_backends()`` or ``"auto"``.
        schedule: ``"one_pass"`` (gradients in the forward, three products), ``"two_pass"``
            (recompute, four) or ``"auto"``.
        max_workspace_bytes: bound on the logits tile; None: the backend's default.
        batch_invariant: a row's log-probability and entropy have the bits that ``linear_logprobs``
            gives them in this mode, whatever the batch: on-policy, the log-ratio is exactly 0. It
            may cost the fourth product, which ``explain`` says.

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
        batch_invariant=batch_invariant,
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
    plan = make_plan(rows, head, active, config, settings)
    call = Call(head, batch, config, plan, settings, keep, active)
    if plan.schedule == "one_pass" and needs.any:
        loss, metrics = one_pass(rows, call, needs)
    else:
        loss, metrics = two_pass(rows, call)
    return PolicyLossOutput(loss, _with_skipped(metrics, active, batch))


_HEAD_OPTIONS = ("logit_scale", "softcap", *HeadSettings.__dataclass_fields__)


class FusedLinearGRPOLoss(nn.Module):
    """Module form of :func:`linear_policy_loss`.

    Keyword arguments are :class:`LossConfig`'s, and ``logit_scale``, ``softcap``, ``precision``,
    ``backend``, ``schedule``, ``max_workspace_bytes`` and ``batch_invariant``.

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
        **batch: object,
    ) -> PolicyLossOutput:
        """Padded: hidden (B, L, D), target (B, L); packed: (T, D), (T,), ``cu_seqlens`` (B + 1,).

        ``advantages``, ``mask`` and the further keyword arguments (``old_logprobs``,
        ``ref_logprobs``, ``rollout_logprobs``, ``kept``, ``num_items_in_batch``, ...) are those of
        :meth:`TokenBatch.from_padded` and :meth:`TokenBatch.from_packed`.
        """
        if cu_seqlens is None:
            tokens = TokenBatch.from_padded(target, advantages, mask, **batch)  # type: ignore[arg-type]
        else:
            tokens = TokenBatch.from_packed(target, advantages, cu_seqlens, mask, **batch)  # type: ignore[arg-type]
        return linear_policy_loss(hidden, weight, tokens, self.config, bias=bias, **self._head)

    def extra_repr(self) -> str:
        return f"{self.config}, " + ", ".join(f"{k}={v!r}" for k, v in self._head.items())


def _check_layout(hidden: Tensor, weight: Tensor, batch: TokenBatch) -> None:
    if tuple(hidden.shape[:-1]) != batch.layout:
        raise ValueError(
            f"hidden: expected shape {(*batch.layout, weight.shape[1])} (the batch's layout and D)"
            f", got {tuple(hidden.shape)}"
        )
    check_device("batch", batch.target, hidden)
    check_target_range(0, batch.max_target, weight.shape[0])
    if batch.kept is not None:
        check_kept_range(batch.kept.max_id, weight.shape[0])


def _needs(rows: Tensor, head: Head) -> Needs:
    tensors = (rows, head.weight, head.bias)
    enabled = torch.is_grad_enabled()
    return Needs(*(enabled and x is not None and x.requires_grad for x in tensors))


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


def _with_skipped(metrics: Metrics, active: TokenBatch, batch: TokenBatch) -> Metrics:
    """Adds the share of the caller's rows that got no backward."""
    total, device = math.prod(batch.layout), batch.target.device
    skipped = torch.full((), total - active.num_tokens, dtype=torch.float64, device=device)
    count = torch.full((), total, dtype=torch.float64, device=device)
    return Metrics({**metrics.stats, "frac_rows_skipped": Stat("mean", skipped, count)})
