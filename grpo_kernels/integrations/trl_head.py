"""Runs TRL's trainers on our head: replaces the function that adds a fused LM head to a model.

TRL's head computes log-probabilities from ``lm_head.weight``; ours is called as a module.
Distillation has a separate function, which gets both weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.common import HOSTS, ForwardOverlay, apply_overlay
from grpo_kernels.head import Head, Transform, head_of_layer
from grpo_kernels.hf import add_fused_head, keep_head_in_fp32
from grpo_kernels.integrations.common import divergence_of
from grpo_kernels.integrations.probe import (
    Probe,
    Replacement,
    Use,
    gradient,
    gradients,
    missing,
    normal,
    tiny_model,
    unlike,
)
from grpo_kernels.integrations.switch import Switch, alive, claim
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# TRL's name of an output: ours
_OUTPUTS = {
    "log_probs": "logprobs",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
_UTILS, _DISTILLATION = "trl.trainer.utils", "trl.trainer.distillation_trainer"
# they reject a head that is a BaseTunerLayer of PEFT, which TRL's function would ignore
_TRAINERS = ("grpo", "rloo", "dpo", "kto", "sft")


def _replacements() -> Iterator[Replacement]:
    yield Replacement(_UTILS, "add_fused_lm_head", add_fused_lm_head, everywhere=True)
    yield Replacement(_DISTILLATION, "_chunked_divergence_loss", chunked_divergence_loss)
    # an adapter on a head other than ours is still an error
    has_peft = import_module("transformers.utils").is_peft_available()
    if has_peft and not missing(f"{_UTILS}:add_fused_lm_head"):
        for name in _TRAINERS:  # no object is an instance of ()
            yield Replacement(f"trl.trainer.{name}_trainer", "BaseTunerLayer", ())


def _too_late() -> str:
    for model in alive(import_module("transformers").PreTrainedModel):
        function = getattr(vars(model).get("forward"), "__func__", None)
        if function is not None and function.__code__.co_name == "_fused_forward":
            return "expected no trainer of TRL yet, got a model that has TRL's own fused head"
    return ""


def _compare() -> Iterator[str]:
    theirs = _score(import_module(_UTILS).add_fused_lm_head)
    yield from unlike("add_fused_lm_head", theirs, _score(add_fused_lm_head))
    for beta in (0.0, 0.3, 1.0):
        theirs = _diverge(import_module(_DISTILLATION)._chunked_divergence_loss, beta)
        ours = _diverge(chunked_divergence_loss, beta)
        yield from unlike(f"_chunked_divergence_loss, beta {beta}", theirs, ours)


def _score(add: Any) -> dict[str, Any]:
    """Return all outputs of a model after a function added its head, and gradients."""
    model = tiny_model()
    add(model, temperature=0.7, outputs=tuple(_OUTPUTS))
    ids = torch.arange(10).reshape(2, 5) % 7
    labels = ids.masked_fill(ids == 3, -100)
    output = model(input_ids=ids, labels=labels, num_items_in_batch=3, fused_lm_head=True)
    (output.loss + output.entropy.sum()).backward()
    return {**output, "gradient": gradient(model)}


def _diverge(host_loss: Any, beta: float) -> dict[str, Any]:
    """Return the results of a function for distillation, and gradients of the student."""
    student, weight, bias = normal(2, 3, 8), normal(11, 8, seed=1), normal(11, seed=2)
    loss, entropy, count = host_loss(
        student,
        normal(2, 3, 4, seed=3).detach(),
        weight,
        normal(11, 4, seed=4).detach(),
        torch.tensor([[1, 1, 0], [1, 0, 1]]),
        beta,
        num_items_in_batch=7,
        student_lm_head_bias=bias,
        student_logit_scale=0.5,
        teacher_logit_scale=0.8,
        student_final_logit_softcapping=3.0,
        teacher_final_logit_softcapping=4.0,
        temperature=0.7,
    )
    results = {"loss": loss, "entropy": entropy, "number of tokens": count}
    return results | gradients(loss, hidden=student, weight=weight, bias=bias)


PROBE = Probe(
    host=HOSTS["trl"],
    replacements=_replacements,
    uses=(
        # any other field would stay None
        Use(
            f"{_UTILS}:FusedCausalLMOutput",
            ("loss", "label_mask", "aux_loss", *_OUTPUTS),
            exact=True,
        ),
        Use(f"{_UTILS}:maybe_gather_lm_head_ctx"),
        # without it ours would not be called
        *(Use(f"trl.trainer.{name}_trainer:add_fused_lm_head") for name in _TRAINERS),
    ),
    compare=_compare,
)
SWITCH = Switch(PROBE, _too_late)
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled


def add_fused_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Replace TRL's function of this name: ``fused_lm_head=True`` scores labels.

    Raises:
        ValueError: our head does not support the model's head, or another adapter has changed the
            model.
    """
    unknown = sorted(set(outputs) - set(_OUTPUTS))
    if unknown:
        raise ValueError(f"outputs: expected any of {', '.join(_OUTPUTS)}; got {unknown}")
    layer = model.get_output_embeddings()
    head_of_layer(layer, Transform())  # for its checks
    if cast_lm_head_to_fp32:
        if hasattr(layer, "base_layer"):
            raise ValueError(
                "cast_lm_head_to_fp32: expected False with an adapter on lm_head, got True"
            )
        vars(layer).pop("forward", None)  # TRL's cast
        keep_head_in_fp32(model)
    claim(model, "trl")
    add_fused_head(model)
    apply_overlay(_ScoresLabels, model)
    own_names = tuple(_OUTPUTS[name] for name in {"log_probs", *outputs})
    model._grpo_scores = {"temperature": temperature, "outputs": own_names}


class _ScoresLabels(ForwardOverlay):
    """The forward that :func:`add_fused_lm_head` adds to a model."""

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        own_forward = super().forward
        if not fused_lm_head:
            return own_forward(*args, **kwargs)
        labels = kwargs.pop("labels", None)
        shifted = kwargs.pop("shift_labels", None)
        count = kwargs.pop("num_items_in_batch", None)
        target = labels[:, 1:] if shifted is None else shifted

        def score(hidden: Tensor, head: Head) -> LinearLogprobs:
            rows = hidden[:, :-1] if shifted is None else hidden
            return linear_logprobs(rows, head, target.to(hidden.device), **self._grpo_scores)

        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        output = own_forward(*args, head_fn=score, **kwargs)
        scores = {name: getattr(output.head, own) for name, own in _OUTPUTS.items()}
        mask = target.to(scores["log_probs"].device) != -100
        if (squares := scores["log_sum_sq_probs"]) is not None:
            scores["log_sum_sq_probs"] = squares.masked_fill(~mask, 1.0).log()
        loss = -scores["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        if output.aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * output.aux_loss
        theirs = import_module(_UTILS).FusedCausalLMOutput
        return theirs(loss=loss, label_mask=mask, aux_loss=output.aux_loss, **scores)


def chunked_divergence_loss(
    student_hidden_states: Tensor,  # (B, K, D)
    teacher_hidden_states: Tensor,  # (B, K, D_t)
    student_lm_head_weight: Tensor,  # (V, D)
    teacher_lm_head_weight: Tensor,  # (V, D_t)
    completion_mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,  # divisor; None: the valid tokens
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace TRL's function of this name: loss, sum of entropies, number of valid tokens."""
    student = Head(
        student_lm_head_weight,
        student_lm_head_bias,
        Transform(student_logit_scale, student_final_logit_softcapping),
    )
    teacher = Head(
        teacher_lm_head_weight,
        teacher_lm_head_bias,
        Transform(teacher_logit_scale, teacher_final_logit_softcapping),
    )
    mask = completion_mask != 0
    valid = mask.sum()
    weights = None
    if num_items_in_batch is not None:  # as a factor of the loss it would round twice
        items = torch.as_tensor(num_items_in_batch, device=mask.device)
        weights = (valid / items).expand(mask.shape)
    # ZeRO-3 gathers the student's head, which it trains; the teacher's must be gathered here
    gathered = import_module(_UTILS).maybe_gather_lm_head_ctx
    with gathered(teacher.weight, teacher.bias):
        divergence = divergence_of(
            beta,
            hidden=student_hidden_states,
            head=student,
            teacher_hidden=teacher_hidden_states,
            teacher=teacher,
            mask=mask,
            temperature=temperature,
            weights=weights,
        )
    return divergence.loss, divergence.entropy.sum(), valid
