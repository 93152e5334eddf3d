"""SkyRL's fused LM head (Megatron) on our kernels, and our losses in its registry.

    import grpo_skyrl  # a copy of this file, where the training processes find it

    grpo_skyrl.enable()  # in each of them
    name = grpo_skyrl.register_policy_loss("cispo", epsilon_high=5.0)

The head takes effect if ``trainer.fused_lm_head_logprob`` is set, the loss if
``trainer.algorithm.policy_loss_type`` is its name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, VocabShard, linear_logprobs
from grpo_kernels.integrations.common import summed_loss
from grpo_kernels.integrations.megatron import vocab_shard_of, with_share_of_gradient
from grpo_kernels.integrations.probe import Host, Probe, Replacement, Use, find
from grpo_kernels.integrations.switch import Switch
from grpo_kernels.losses import LOSSES, check_name

_HOST = Host("skyrl", ("0.3",))
_REGISTRY = "skyrl.backends.skyrl_train.utils.ppo_utils:PolicyLossRegistry"
_LOSSES = Probe(
    host=_HOST,
    uses=(Use(f"{_REGISTRY}.register", ("name", "func")),),
    override="any_version=True",
)
_MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
# our aggregation -> SkyRL's loss_reduction, which scales the advantages before the loss
_REDUCTIONS = {
    "window_token_mean": "token_mean",
    "token_mean": "token_mean_legacy",
    "sequence_mean": "sequence_mean",
    "fixed_length": "seq_mean_token_sum_norm",
    "prompt_mean": "prompt_mean",
}
# settings of LossConfig that SkyRL cannot support
_OF_SKYRL = (
    "beta",  # use trainer.algorithm.use_kl_loss
    "temperature",
    "max_completion_length",
    "exclude_zero_variance",
    "entropy_coef",  # a loss gets no entropies
    "top_entropy_quantile",
)
# settings of SkyRL's off_policy_correction that enable something
_CORRECTIONS = (
    "tis_ratio_type",
    "sequence_mask_metric",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)


def fused_lm_head_logprob_apply(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
) -> Tensor:
    """Replace SkyRL's ``_fused_lm_head_logprob_apply``: log-probabilities (B, S) of targets.

    Args:
        hidden: (B, S, D), gathered if they were split; cast to the dtype of ``weight``.
        weight: (V / n, D), this rank's rows.
        target: (B, S) int64 ids, shifted by the caller.
        vocab_start_index, vocab_end_index: the ids of the rows.
        tp_group: the n ranks that share the vocabulary.
        inference_only: whether no gradient is needed.
        backend, chunk_size: ignored: there is one kernel, which chooses its own chunks.

    Returns:
        (B, S) fp32. Each rank's gradient of ``hidden`` is a part; SkyRL sums the parts.

    Raises:
        ValueError: a shape, dtype or value is wrong.
    """
    shard = vocab_shard_of(weight, tp_group, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else nullcontext():
        return _scored("logprobs", hidden, weight, target, shard)


def fused_vocab_parallel_entropy_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: Any,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Replace SkyRL's function of this name: entropies (B, S) in nats, fp32.

    Arguments are as in :func:`fused_lm_head_logprob_apply`; ``temperature`` divides the logits.
    """
    shard = vocab_shard_of(lm_head_weight, tp_group)
    ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    return _scored("entropy", hidden, lm_head_weight, ids, shard, temperature)


def _scored(
    output: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    shard: VocabShard | None,
    temperature: float = 1.0,
) -> Tensor:
    hidden = with_share_of_gradient(hidden.to(weight.dtype), shard)
    scores = linear_logprobs(
        hidden, weight, target, temperature=temperature, vocab_shard=shard, outputs=(output,)
    )
    return getattr(scores, output)


def _replacements() -> Iterator[Replacement]:
    for ours in (fused_lm_head_logprob_apply, fused_vocab_parallel_entropy_from_hidden):
        yield Replacement(_MODEL_UTILS, f"_{ours.__name__}", ours, everywhere=True)


SWITCH = Switch(Probe(host=_HOST, replacements=_replacements))
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled


def register_policy_loss(
    loss_type: str,
    name: str | None = None,
    *,
    loss_aggregation: str | None = None,
    any_version: bool = False,
    **settings: Any,
) -> str:
    """Add one of our losses to SkyRL's registry; return its name for ``policy_loss_type``.

    Args:
        loss_type: a name in ``grpo_kernels.losses.LOSSES``. ``trainer.algorithm.loss_reduction``
            must match it: token_mean (dapo, cispo, vespo, pg, topr), token_mean_legacy (bnpo),
            sequence_mean (grpo, gspo, sapo, gmpo) or seq_mean_token_sum_norm (dr_grpo).
        name: the name to register; None: ``grpo_kernels.`` plus ``loss_type``.
        loss_aggregation: replaces the loss's own: window_token_mean, token_mean, sequence_mean,
            fixed_length or prompt_mean. ``loss_reduction`` must then be token_mean,
            token_mean_legacy, sequence_mean, seq_mean_token_sum_norm or prompt_mean.
        any_version: also accept other versions of SkyRL.
        settings: of :class:`grpo_kernels.LossConfig`. SkyRL's own loss settings are ignored.

    Raises:
        ImportError: SkyRL is not installed, or it differs.
        ValueError: the loss is unknown or has no matching ``loss_reduction``, a setting is
            unknown, out of range or not supported, or the name is taken. In a call:
            ``loss_reduction`` does not match, or ``off_policy_correction`` is set (use
            ``rollout_correction_mode`` here).
    """
    _LOSSES.check(any_version)
    check_name("loss_type", loss_type, LOSSES)
    aggregation = loss_aggregation or LOSSES[loss_type].aggregation
    check_name("loss_aggregation", aggregation, _REDUCTIONS)
    for setting in _OF_SKYRL:
        if setting in settings:
            raise ValueError(
                f"{setting}: expected none, since SkyRL sets it, got {settings[setting]!r}"
            )
    # a sum needs no aggregation, and this one uses nothing from a batch
    fixed = {"loss_aggregation": "window_token_mean"}
    settings = {"rollout_correction_mode": None, **settings}
    config = LossConfig(loss_type=loss_type, **fixed, **settings)
    if not config.surrogate.vanishes_at_zero_advantage:
        raise ValueError(
            "loss_type: expected a loss that is proportional to advantages, which SkyRL scales, "
            f"got {loss_type!r} with a penalty"
        )
    name = f"grpo_kernels.{loss_type}" if name is None else name
    find(_REGISTRY).register(
        name, functools.partial(_policy_loss, config, _REDUCTIONS[aggregation])
    )
    return name


def _policy_loss(
    own: LossConfig,
    reduction: str,  # the loss_reduction that it is registered for
    log_probs: Tensor,  # (B, T), like the following arguments
    old_log_probs: Tensor,
    advantages: Tensor,  # already divided as loss_reduction requires
    config: Any,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    _check_algorithm(own.loss_type, reduction, config)
    mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
    batch = TokenBatch.from_padded(
        torch.zeros_like(log_probs, dtype=torch.int64),  # ids, which losses do not read
        advantages,
        mask,
        old_logprobs=old_log_probs,
        rollout_logprobs=rollout_logprobs,
    )
    loss, metrics = summed_loss(log_probs, batch, own)
    values = torch.stack([value.double() for value in metrics.values()])
    values = values if batch.num_tokens else torch.zeros_like(values)  # a mean over none is NaN
    return loss, dict(zip(metrics, values.tolist(), strict=True))


def _check_algorithm(loss_type: str, reduction: str, config: Any) -> None:
    """Raise ValueError if SkyRL's settings do not match the loss."""
    if config.loss_reduction != reduction:
        raise ValueError(
            f"loss_reduction: expected {reduction!r} for {loss_type}, got {config.loss_reduction!r}"
        )
    for name in _CORRECTIONS:
        value = getattr(config.off_policy_correction, name)
        if value is not None:
            raise ValueError(
                f"off_policy_correction.{name}: expected None (use rollout_correction_mode of "
                f"register_policy_loss instead), got {value!r}"
            )
