"""linear_policy_loss: hidden states and the LM-head weight in, policy loss and gradients out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.batch import TokenBatch
from grpo_kernels.engine import Bounded, RunOptions, raise_on_all_ranks
from grpo_kernels.head import Head, HeadLoRA, VocabShard, check_floating, head_of, unshard_head
from grpo_kernels.losses import LossConfig, PolicyLossOutput
from grpo_kernels.schedule import Plan, compiled_policy_loss, make_call, run_plan


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
    precision: str = "fp32",
    backend: str = "auto",
    schedule: str = "auto",
    max_workspace_bytes: int | None = None,
    batch_invariant: bool = False,
    metric_rows: str = "all",
    backward: str | Bounded = "exact",
    activation_bytes: int | None = None,
    main_grad: Tensor | None = None,
) -> PolicyLossOutput:
    """Compute the policy loss of a linear head, without the (tokens, vocabulary) logits.

    Args:
        hidden: (B, L, D) or (T, D) last hidden states, laid out as ``batch`` was built; row t is
            the state that predicts ``target[t]``.
        weight: (V, D) LM-head weight, or a :class:`Head`, which holds everything that makes
            logits. A frozen weight costs no gradient GEMM.
        batch: the tokens that carry the loss. Other rows of ``hidden`` are never multiplied.
        config: the loss; ``config.temperature`` divides the logits.
        bias: (V,) or None.
        lora: an adapter of the head, whose factors get gradients; no (V, D) tensor is made of it.
        logit_scale, softcap, vocab_shard: as in :func:`grpo_kernels.linear_logprobs`.
        precision: ``"fp32"`` (exact), ``"input"`` or ``"tf32"``, as in ``linear_logprobs``.
        backend: a name of ``available_backends()`` or ``"auto"``.
        schedule: ``"one_pass"`` (three GEMMs, the gradients' in the forward, or in the backward
            from (T, V) exponentials in bf16), ``"two_pass"`` (recompute, four) or ``"auto"``:
            one_pass where it can run, unless a 16-bit head would add to an fp32 (V, D) sum after
            many small chunks.
        max_workspace_bytes: bound on the logits tile, in both schedules, and on exponentials; None:
            the backend's default. On out-of-memory the call is retried with a smaller tile, and
            warns.
        batch_invariant: a row's log-probability and entropy have the bits that ``linear_logprobs``
            gives them in this mode, whatever the batch: on-policy, the log-ratio is exactly 0. This
            may require two passes; ``explain`` tells.
        metric_rows: whether metrics include rows that cannot get a gradient (zero advantage, no KL
            penalty, no entropy bonus). ``"all"``: these rows take the forward, and metrics are over
            all tokens of ``batch``. ``"active"``: they are not computed, and metrics are over the
            rows with a gradient, and over the sequences that have one. (Where advantages act on
            whole sequences, whole sequences are left out.) The loss and its gradients are the
            same.
        backward: ``"exact"``; ``"sparse"``: gradients from the large entries of the softmax and an
            unbiased sample of the small ones, within a tolerance; or a :class:`Bounded`, its object
            form. With an entropy bonus it takes one pass, and no sampling mask.
        activation_bytes: how much two passes may keep from the forward for the backward, as for
            ``linear_logprobs``. One pass keeps its gradients until the backward; on a GPU that
            stores exponentials of the logits (see ``explain``) it keeps these, if they fit.
        main_grad: (V, D) fp32 (fp64 for fp64 hidden states), a buffer such as Megatron's
            ``main_grad`` or an existing ``weight.grad``: each backward adds the weight's gradient
            to it, and autograd gets none, so hooks and DDP do not see it.
            In two_pass, and where one_pass keeps exponentials, no further (V, D) tensor exists; in
            one_pass otherwise an fp32 one, from the forward to the backward.

    Returns:
        :class:`PolicyLossOutput`; the loss can be scaled and differentiated more than once, but not
        twice in a row (no second derivatives). Metrics are computed when they are first read.

    Raises:
        ValueError: a shape, dtype, device, value or name is wrong; the message names the argument.
        RuntimeError: ``batch_invariant`` does not hold for the library's GEMM.
    """
    check_floating("hidden", hidden)
    shard = weight.shard if isinstance(weight, Head) else vocab_shard
    with raise_on_all_ranks(shard, hidden.device):
        options = RunOptions(
            precision=precision,
            backend=backend,
            schedule=schedule,
            max_workspace_bytes=max_workspace_bytes,
            batch_invariant=batch_invariant,
            metric_rows=metric_rows,
            backward=backward,
            activation_bytes=activation_bytes,
        )
        temperature = _temperature(config)
        head = head_of(
            weight=weight,
            bias=bias,
            lora=lora,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=temperature,
            shard=vocab_shard,
        )
        head = unshard_head(head)
        if torch.compiler.is_compiling():
            return compiled_policy_loss(
                hidden=hidden,
                head=head,
                batch=batch,
                config=config,
                options=options,
                main_grad=main_grad,
            )
        states, plan = make_call(
            hidden=hidden,
            head=head,
            batch=batch,
            config=config,
            options=options,
            main_grad=main_grad,
        )
    return run_plan(states, plan)


def explain(
    hidden: Tensor,
    weight: Tensor | Head,
    batch: TokenBatch,
    config: LossConfig,
    *,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    vocab_shard: VocabShard | None = None,
    **options: Any,
) -> Plan:
    """Return the plan that ``linear_policy_loss`` would follow for the same arguments; print it.

    Its ``fingerprint`` is a line to log with a run: it names the kernels, their configuration, the
    precision, the schedule and the libraries. Runs with different fingerprints may differ bitwise.

    Args:
        options: the other arguments of ``linear_policy_loss``, from ``precision`` to
            ``activation_bytes``.

    Raises:
        ValueError: as ``linear_policy_loss`` would for these arguments.
    """
    temperature = _temperature(config)
    head = head_of(
        weight=weight,
        bias=bias,
        lora=lora,
        logit_scale=logit_scale,
        softcap=softcap,
        temperature=temperature,
        shard=vocab_shard,
    )
    chosen = RunOptions(**options)
    return make_call(hidden=hidden, head=head, batch=batch, config=config, options=chosen)[1]


def _temperature(config: LossConfig) -> float:
    """Return ``config.temperature``; a wrong ``config`` is rejected later."""
    return config.temperature if isinstance(config, LossConfig) else 1.0


_HEAD_OPTIONS = ("logit_scale", "softcap", "vocab_shard", *RunOptions.__dataclass_fields__)


class FusedLinearGRPOLoss(nn.Module):
    """Module form of :func:`linear_policy_loss`.

    Keyword arguments are :class:`LossConfig`'s, those of its loss included, and ``logit_scale``,
    ``softcap``, ``vocab_shard``, ``precision``, ``backend``, ``schedule``, ``max_workspace_bytes``,
    ``batch_invariant``, ``metric_rows``, ``backward`` and ``activation_bytes``.

    Example:
        >>> loss_fn = FusedLinearGRPOLoss(loss_type="dapo", beta=0.04)
        >>> loss, metrics = loss_fn(hidden, lm_head.weight, completion_ids, advantages, mask,
        ...                         ref_logprobs=ref_logprobs)
        >>> loss.backward()
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._head = {name: options.pop(name) for name in _HEAD_OPTIONS if name in options}
        RunOptions(**{k: v for k, v in self._head.items() if k in RunOptions.__dataclass_fields__})
        self.config = LossConfig(**options)

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor | Head,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        bias: Tensor | None = None,
        lora: HeadLoRA | None = None,
        main_grad: Tensor | None = None,
        **batch: object,
    ) -> PolicyLossOutput:
        """Compute the loss and its metrics, of padded tokens (hidden (B, L, D), target (B, L)) or
        packed ones ((T, D), (T,), with ``cu_seqlens`` (B + 1,)).

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
            main_grad=main_grad,
            **self._head,
        )

    def extra_repr(self) -> str:
        """Return the configuration and the options, for ``print``."""
        return f"{self.config}, " + ", ".join(f"{k}={v!r}" for k, v in self._head.items())
