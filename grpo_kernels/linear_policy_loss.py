"""linear_policy_loss: from hidden states and the LM-head weight to the loss and its gradients."""

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
    """Compute the policy loss of a linear head without storing its (tokens, vocabulary) logits.

    ``grpo_kernels.losses.LOSSES`` names the paper of each loss.

    Example:
        >>> hidden = torch.randn(2, 8, 64, requires_grad=True)  # (B, L, D)
        >>> weight = torch.randn(1000, 64, requires_grad=True)  # (V, D)
        >>> target = torch.randint(1000, (2, 8))
        >>> batch = TokenBatch.from_padded(target, advantages=torch.tensor([1.0, -1.0]))
        >>> loss, metrics = linear_policy_loss(hidden, weight, batch, LossConfig(loss_type="dapo"))
        >>> loss.backward()

    Args:
        hidden: (B, L, D) or (T, D) last hidden states, in the layout that ``batch`` was built
            from; row t is the state that predicts ``target[t]``.
        weight: (V, D) LM-head weight, or a :class:`Head`, which also holds the bias, LoRA, scale,
            softcap and shard. A frozen weight costs no gradient GEMM.
        batch: the tokens that carry the loss. Other rows of ``hidden`` are never multiplied.
        config: the loss; ``config.temperature`` divides the logits.
        bias: (V,) or None.
        lora: an adapter of the head. Its factors get gradients; no (V, D) update is formed.
        logit_scale, softcap, vocab_shard: as in :func:`grpo_kernels.linear_logprobs`.
        precision: ``"fp32"`` (exact), ``"input"`` or ``"tf32"``, as in ``linear_logprobs``.
        backend: a name from ``available_backends()``, or ``"auto"``.
        schedule: when the gradients are computed:

            * ``"one_pass"``: in the forward, or in the backward from stored bf16 (T, V)
              exponentials. Three GEMMs.
            * ``"two_pass"``: in the backward, from logits that are computed again. Four GEMMs.
            * ``"auto"``: one pass if it can run, unless a 16-bit head would have to add to an
              fp32 (V, D) sum after each of many small chunks.
        max_workspace_bytes: maximum size of the logits tile, in both schedules, and of the
            exponentials; None: the backend's default. After an out-of-memory error the call is
            retried with a smaller tile, with a warning.
        batch_invariant: give a row's log-probability and entropy the same bits as
            ``linear_logprobs`` does in this mode, in every batch: on-policy, the log-ratio is
            exactly 0. This may require two passes; ``explain`` tells.
        metric_rows: whether metrics include rows that cannot get a gradient (zero advantage, no KL
            penalty, no entropy bonus). The loss and its gradients are the same either way.

            * ``"all"``: these rows run the forward, and metrics cover all tokens of ``batch``.
            * ``"active"``: these rows are not computed, and metrics cover only rows and sequences
              with a gradient. If the loss works on whole sequences, whole sequences are left out.
        backward: ``"exact"``; ``"sparse"``: gradients from the large entries of the softmax and an
            unbiased sample of the small ones, within a tolerance; or a :class:`Bounded` with its
            settings. With an entropy bonus, a sparse backward needs one pass and no sampling mask.
        activation_bytes: how much two passes may keep from the forward for the backward, as in
            ``linear_logprobs``. One pass keeps its gradients until the backward; on a GPU that
            stores exponentials of the logits (see ``explain``), it keeps these instead if they fit.
        main_grad: (V, D) fp32 buffer (fp64 for fp64 hidden states), such as Megatron's
            ``main_grad`` or an existing ``weight.grad``. Each backward adds the weight's gradient
            to it; autograd gets none, so hooks and DDP do not see it. Two passes, and one pass that
            keeps exponentials, need no other (V, D) tensor; one pass otherwise holds an fp32 one
            from the forward to the backward.

    Returns:
        :class:`PolicyLossOutput`. You can scale the loss and call its backward more than once, but
        there are no second derivatives. Metrics are computed when first read.

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
    """Return the plan of a ``linear_policy_loss`` call with the same arguments, without running it.

    Args:
        options: the other arguments of ``linear_policy_loss``, from ``precision`` to
            ``activation_bytes``.

    Returns:
        The :class:`Plan`. Print it to see what runs and why, and log its ``fingerprint`` with a
        run: it names the kernels, their configuration, the precision, the schedule and the
        libraries. Runs with different fingerprints may differ bitwise.

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

    Keyword arguments are the settings of :class:`LossConfig` and of the chosen loss, and
    ``logit_scale``, ``softcap``, ``vocab_shard``, ``precision``, ``backend``, ``schedule``,
    ``max_workspace_bytes``, ``batch_invariant``, ``metric_rows``, ``backward`` and
    ``activation_bytes``.

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
        """Compute the loss and its metrics for padded or packed tokens.

        Padded: hidden (B, L, D), target (B, L). Packed: hidden (T, D), target (T,), and
        ``cu_seqlens`` (B + 1,). ``advantages``, ``mask`` and the other keyword arguments
        (``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``, ``sampling_mask``,
        ``num_items_in_batch``, ...) are as in :meth:`TokenBatch.from_padded` and
        :meth:`TokenBatch.from_packed`.
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
