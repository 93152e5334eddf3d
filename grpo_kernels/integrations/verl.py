"""Runs verl's fused heads on ours: FSDP's (``impl_backend`` torch, liger or triton), Megatron's.

Each worker enables them before it builds models.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.common import HOSTS, ForwardOverlay, apply_overlay
from grpo_kernels.head import Head, VocabShard
from grpo_kernels.hf import add_fused_head
from grpo_kernels.integrations.common import summed_loss
from grpo_kernels.integrations.megatron import vocab_shard_of, with_share_of_gradient
from grpo_kernels.integrations.probe import Probe, Replacement, Use
from grpo_kernels.integrations.switch import Switch, claim
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.losses import LossConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BACKENDS = ("torch", "liger", "triton")
_CORE = "verl.trainer.ppo.core_algos"
_FUNCTIONAL = "verl.utils.experimental.torch_functional"
_KERNEL = "verl.utils.kernel.linear_cross_entropy"
_TENSORDICT = "verl.utils.tensordict_utils"
# verl's names of our aggregations
_AGGREGATIONS = {
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "fixed_length": "seq-mean-token-sum-norm",
    "token_mean": "token-mean",
    "window_token_mean": "token-mean",
}


def _replacements() -> Iterator[Replacement]:
    yield Replacement(f"{_FUNCTIONAL}:FusedLinearForPPO", "forward", _fused_linear_for_ppo)
    yield Replacement(_KERNEL, "linear_cross_entropy", linear_cross_entropy, everywhere=True)
    patch = "verl.models.transformers.monkey_patch"
    yield Replacement(patch, "patch_forward_with_backends", patch_forward_with_backends)
    engine = "verl.workers.engine.fsdp.transformer_impl:FSDPEngineWithLMHead"
    yield Replacement(engine, "prepare_model_inputs", _at_any_temperature, wraps=True)


def patch_forward_with_backends(
    model: PreTrainedModel,
    use_fused_kernels: bool = False,
    fused_kernels_backend: str | None = None,
) -> None:
    """Replace verl's function of this name: ``model(..., temperature=...)`` scores tokens.

    Our head replaces all of verl's backends. Only this object is changed, not the class of
    ``model``.

    Raises:
        ValueError: our head does not support the model's head, or another adapter has changed the
            model.
    """
    if not use_fused_kernels:
        return
    if fused_kernels_backend not in _BACKENDS:
        raise ValueError(
            f"impl_backend: expected one of {', '.join(_BACKENDS)}, got {fused_kernels_backend!r}"
        )
    claim(model, "verl")
    add_fused_head(model)
    apply_overlay(_TakesTemperature, model)


class _TakesTemperature(ForwardOverlay):
    """The forward that :func:`patch_forward_with_backends` adds to a model."""

    def forward(self, *args: Any, temperature: float | Tensor | None = None, **kwargs: Any) -> Any:
        own_forward = super().forward
        if temperature is None:
            return own_forward(*args, **kwargs)
        ids = kwargs.pop("shift_labels", None)
        labels = kwargs.pop("labels", None)
        if ids is None:  # the next token of each one, as in verl's forwards
            labels = kwargs.get("input_ids") if labels is None else labels
            if labels is None:
                raise ValueError(
                    "input_ids: expected ids, labels or shift_labels to score, got None"
                )
            ids = labels.roll(-1, -1)
        score = functools.partial(_score, ids=ids, temperature=temperature)
        log_probs, entropy = own_forward(*args, head_fn=score, **kwargs).head
        output = import_module("verl.models.transformers.dense_common").CausalLMOutputForPPO
        return output(log_probs=log_probs, entropy=entropy)


def linear_cross_entropy(
    hidden: Tensor,  # (..., D), N rows
    weight: Tensor,  # (V, D), or this rank's rows of it
    labels: Tensor,  # N ids of the whole vocabulary
    temperature: float | Tensor = 1.0,  # a number, or one per row
    reduction: str = "none",
    dist_process_group: dist.ProcessGroup | None = None,  # the ranks that share the vocabulary
) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (N,) and entropies (N,) of labels.

    On several ranks, each gradient of ``hidden`` is a part of the sum over ranks, as in verl.
    """
    if reduction != "none":
        raise ValueError(f"reduction: expected 'none', got {reduction!r}")
    shard = None if dist_process_group is None else vocab_shard_of(weight, dist_process_group)
    hidden = with_share_of_gradient(hidden.reshape(-1, hidden.shape[-1]), shard)
    return _score(
        hidden=hidden, weight=weight, ids=labels.reshape(-1), temperature=temperature, shard=shard
    )


def register_policy_loss(name: str, config: LossConfig) -> None:
    """Register our loss as a ``loss_mode`` of verl: ``actor.policy_loss.loss_mode=name``.

    ``actor.loss_agg_mode`` must be the loss's own aggregation. verl's settings, such as
    ``clip_ratio``, have no effect on it.

    Raises:
        ValueError: the name is taken, or the config has a KL penalty or an entropy bonus, which
            verl adds itself.
    """
    registry = import_module(_CORE).POLICY_LOSS_REGISTRY
    if name in registry:
        raise ValueError(f"name: expected a name that verl does not use yet, got {name!r}")
    for setting, off in {"beta": 0, "entropy_coef": 0, "top_entropy_quantile": 1}.items():
        if (value := getattr(config, setting)) != off:
            raise ValueError(
                f"{setting}: expected {off} (verl passes only log-probabilities), got {value}"
            )
    registry[name] = functools.partial(_policy_loss, config)


def _policy_loss(
    loss_config: LossConfig,
    old_log_prob: Tensor,  # (B, L), like all except the last
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,  # verl's ActorConfig
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    expected = _AGGREGATIONS.get(loss_config.aggregation_name)
    if loss_agg_mode != expected:
        raise ValueError(
            f"loss_agg_mode: expected {expected!r}, the aggregation of {loss_config.loss_type}, "
            f"got {loss_agg_mode!r}"
        )
    batch_info = dict(getattr(config, "global_batch_info", {}))
    length = batch_info.get("loss_scale_factor")
    own_length = loss_config.max_completion_length
    if loss_config.aggregation.divides_by_max_length and length not in (None, own_length):
        raise ValueError(
            f"loss_scale_factor: expected None or max_completion_length = {own_length}, "
            f"got {length}"
        )
    batch_info["loss_scale_factor"] = own_length
    mask = response_mask.bool()
    batch = TokenBatch.from_padded(
        torch.where(mask, 0, -100),
        advantages,
        mask,
        old_logprobs=old_log_prob,
        rollout_weights=rollout_is_weights,
    )
    with torch.enable_grad():  # verl's weight per token, since its aggregation is linear
        ones = torch.ones_like(log_prob, dtype=torch.float64, requires_grad=True)
        aggregated = import_module(_CORE).agg_loss(ones, mask, loss_agg_mode, **batch_info)
    (weights,) = torch.autograd.grad(aggregated, ones)
    loss, metrics = summed_loss(log_prob.float(), batch, loss_config, weights)
    return loss, {f"actor/{name}": float(value) for name, value in metrics.items()}


def _fused_linear_for_ppo(
    self,
    hidden_states,
    vocab_weights,
    input_ids,
    temperature=1.0,
):
    """Replace the forward of ``FusedLinearForPPO``."""
    return _score(hidden_states, vocab_weights, input_ids, temperature)


def _score(
    hidden: Tensor,
    weight: Tensor | Head,
    ids: Tensor,
    temperature: float | Tensor,  # a number, one per sample or one per token
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    if isinstance(temperature, Tensor) and temperature.shape != ids.shape:
        per_sample = temperature.reshape(-1, *[1] * (ids.dim() - 1))
        temperature = per_sample.expand(ids.shape).to(ids.device)
    scores = linear_logprobs(
        hidden,
        weight,
        ids.to(hidden.device, torch.int64),
        temperature=temperature,
        vocab_shard=shard,
        outputs=("logprobs", "entropy"),
    )
    return scores.logprobs, scores.entropy  # type: ignore[return-value]


def _at_any_temperature(theirs: Any) -> Any:
    """Return a ``prepare_model_inputs`` that passes temperatures per sample to the fused head."""
    utils = import_module(_TENSORDICT)

    @functools.wraps(theirs)
    def prepare_model_inputs(self: Any, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        fused = utils.get_non_tensor_data(micro_batch, "use_fused_kernels", default=False)
        if not fused or not isinstance(micro_batch["temperature"], Tensor):
            return theirs(self, micro_batch)
        unfused = micro_batch.copy()
        utils.assign_non_tensor(unfused, use_fused_kernels=False)
        inputs, outputs = theirs(self, unfused)
        inputs |= {"return_dict": True, "temperature": micro_batch["temperature"]}
        if "temperature_rmpad" in outputs:  # packed
            inputs["temperature"] = outputs["temperature_rmpad"][None]
            inputs["shift_labels"] = outputs["input_ids_rmpad_rolled"][None]
        return inputs, outputs

    return prepare_model_inputs


# numbers are not compared: verl's functions run FlashAttention or Triton kernels, or change classes
PROBE = Probe(
    host=HOSTS["verl"],
    replacements=_replacements,
    uses=(
        Use(  # linear_cross_entropy is its ``apply``, which hides the parameters
            f"{_KERNEL}:LinearCrossEntropy.forward",
            tuple(inspect.signature(linear_cross_entropy).parameters),
            exact=True,
        ),
        Use("verl.models.transformers.dense_common:CausalLMOutputForPPO", ("log_probs", "entropy")),
        Use(f"{_TENSORDICT}:get_non_tensor_data", ("data", "key", "default")),
        Use(f"{_TENSORDICT}:assign_non_tensor", ("tensor_dict",)),
        Use(f"{_CORE}:agg_loss", ("loss_mat", "loss_mask", "loss_agg_mode", "loss_scale_factor")),
        Use(f"{_CORE}:POLICY_LOSS_REGISTRY"),
    ),
)
SWITCH = Switch(PROBE)
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled
