"""prime-rl's fused LM heads on our kernels, and our losses as its custom ones.

    import grpo_prime_rl  # a copy of this file, where the trainer's process finds it
    grpo_prime_rl.enable()  # in that process; also changes existing heads

Losses need no ``enable()``: name them in prime-rl's configuration, with settings of
:class:`grpo_kernels.LossConfig`::

    [trainer.loss]
    type = "custom"
    import_path = "grpo_prime_rl.cispo"
    kwargs = { epsilon_high = 5.0 }
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch, Transform, linear_logprobs
from grpo_kernels.head import head_of_layer
from grpo_kernels.integrations.common import summed_loss
from grpo_kernels.integrations.probe import Host, Probe, Replacement
from grpo_kernels.integrations.switch import Switch
from grpo_kernels.losses import LOSSES, check_name

# module: its head
_LAYERS = "prime_rl.trainer.models.layers"
_HEADS = {"lm_head": "FusedOutputLinear", "lm_head_gemma": "GemmaFusedOutputLinear"}
# settings of LossConfig that prime-rl cannot support
_OF_PRIME_RL = (
    "temperature",
    "loss_aggregation",  # prime-rl divides the sum of all samples by the step's loss tokens
    "max_completion_length",
    "exclude_zero_variance",
    "entropy_coef",  # a loss gets no entropies
    "top_entropy_quantile",
    "rollout_correction_mode",  # inference_logprobs are the old policy's
    "rollout_correction_min",
    "rollout_correction_max",
)


def _forward(
    self: Any,  # prime-rl's head: an nn.Linear, called as a module
    hidden_states: Tensor,  # (b, s, h)
    labels: Tensor | None = None,  # (b, s)
    temperature: Tensor | None = None,  # (b, s)
) -> Any:
    """Return prime-rl's output, with fp32 log-probabilities and entropies (b, s) of the labels."""
    for name, value in (("labels", labels), ("temperature", temperature)):
        if value is None:
            raise ValueError(f"{name}: expected a tensor of shape (b, s), got None")
    assert labels is not None and temperature is not None
    head = head_of_layer(self, Transform(softcap=getattr(self, "softcap", None)))
    scores = linear_logprobs(
        hidden_states, head, labels, temperature=temperature, outputs=("logprobs", "entropy")
    )
    output = import_module(f"{_LAYERS}.lm_head").PrimeLmOutput
    return output(logprobs=scores.logprobs, entropy=scores.entropy)


def _replacements() -> Iterator[Replacement]:
    for module, name in _HEADS.items():
        yield Replacement(f"{_LAYERS}.{module}:{name}", "forward", _forward)


SWITCH = Switch(Probe(host=Host("prime-rl", ("0.8",)), replacements=_replacements))
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled


def loss_fn(loss_type: str) -> Callable[..., Any]:
    """Return one of our losses as a loss function of prime-rl, ``fn(inputs, **settings)``.

    It returns ``LossOutputs``: the weighted sum over the tokens of a sample, with weights from
    ``loss_weights``, and the metrics. ``inference_logprobs`` are the old policy's. Settings are
    fields of :class:`grpo_kernels.LossConfig`. ``grpo_prime_rl.<name>`` returns the same, also for
    losses that you have registered.

    Raises:
        ValueError: the loss is unknown, or does not average over the tokens of a step, as prime-rl
            does. In a call: a setting is unknown, out of range or not supported; ``beta`` is not 0
            and there are no ``ref_logprobs``.
    """
    possible = [name for name, loss in LOSSES.items() if loss.aggregation == "window_token_mean"]
    check_name("loss_type", loss_type, possible)
    return functools.partial(_loss, loss_type)


def _loss(loss_type: str, inputs: Any, /, **settings: Any) -> Any:
    for name in _OF_PRIME_RL:
        if name in settings:
            raise ValueError(
                f"{name}: expected none, since prime-rl sets it, got {settings[name]!r}"
            )
    # a sum needs no aggregation, and this one uses nothing from a batch
    fixed = {"loss_aggregation": "window_token_mean", "rollout_correction_mode": None}
    config = LossConfig(loss_type=loss_type, **fixed, **settings)
    mask = inputs.loss_mask
    batch = TokenBatch.from_packed(
        torch.zeros_like(mask, dtype=torch.int64),  # ids, which losses do not read
        inputs.advantages,
        torch.tensor([0, mask.numel()], device=mask.device),
        mask,
        old_logprobs=inputs.inference_logprobs,
        ref_logprobs=inputs.ref_logprobs if config.beta != 0 else None,
        rollout_logprobs=inputs.inference_logprobs if config.bypasses else None,
    )
    loss, metrics = summed_loss(inputs.trainer_logprobs, batch, config, inputs.loss_weights)
    outputs = import_module("prime_rl.trainer.rl.loss").LossOutputs
    # a mean over no tokens is NaN
    logged = {name: value.float() for name, value in metrics.items()} if batch.num_tokens else {}
    return outputs(loss=loss, metrics=logged)


def __getattr__(name: str) -> Any:
    # losses can be registered at any time
    if name not in LOSSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loss_fn(name)
