"""TRL's trainers on our head, by the one function that gives a model its fused LM head.

TRL's takes log-probabilities from ``lm_head.weight``. Ours is called as a module. Distillation has
a function of its own, which is handed both weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.head import Head, Transform, head_of_layer
from grpo_kernels.hf import add_fused_head, keep_head_in_fp32
from grpo_kernels.integrations.common import divergence_of
from grpo_kernels.integrations.probe import (
    Probe,
    Replacement,
    Use,
    gradient,
    gradients,
    normal,
    tiny_model,
    unlike,
)
from grpo_kernels.integrations.switch import HOSTS, Switch, alive, claim
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs
from grpo_kernels.overlay import ForwardOverlay, apply_overlay

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
# they refuse a head that is a BaseTunerLayer of PEFT, which theirs would pass by
_TRAINERS = ("grpo", "rloo", "dpo", "kto", "sft")


def _replacements() -> Iterator[Replacement]:
    yield Replacement(_UTILS, "add_fused_lm_head", add_fused_lm_head, everywhere=True)
    yield Replacement(_DISTILLATION, "_chunked_divergence_loss", chunked_divergence_loss)
    peft_is_here = import_module("transformers.utils").is_peft_available()
    # an adapter on another head than ours stays an error
    if peft_is_here and hasattr(import_module(_UTILS), "add_fused_lm_head"):
        for name in _TRAINERS:  # nothing is an instance of it
            yield Replacement(f"trl.trainer.{name}_trainer", "BaseTunerLayer", ())


def _too_late() -> str:
    models = alive(import_module("transformers").PreTrainedModel)
    functions = [getattr(vars(model).get("forward"), "__func__", None) for model in models]
    fused = any(x is not None and x.__code__.co_name == "_fused_forward" for x in functions)
    wrong = "expected no trainer of TRL yet, got a model that has TRL's own fused head"
    return wrong if fused else ""


def _compare() -> Iterator[str]:
    utils, distillation = import_module(_UTILS), import_module(_DISTILLATION)
    scored = (_scored(add) for add in (utils.add_fused_lm_head, add_fused_lm_head))
    yield from unlike("add_fused_lm_head", *scored)
    for beta in (0.0, 0.3, 1.0):
        losses = (distillation._chunked_divergence_loss, chunked_divergence_loss)
        diverged = (_diverged(loss, beta) for loss in losses)
        yield from unlike(f"_chunked_divergence_loss, beta {beta}", *diverged)


def _scored(add: Any) -> dict[str, Any]:
    """Return all outputs of a model whose head was added by a function, and gradients."""
    model = tiny_model()
    add(model, temperature=0.7, outputs=tuple(_OUTPUTS))
    ids = torch.arange(10).reshape(2, 5) % 7
    labels = ids.masked_fill(ids == 3, -100)
    output = model(input_ids=ids, labels=labels, num_items_in_batch=3, fused_lm_head=True)
    (output.loss + output.entropy.sum()).backward()
    return {**output, "gradient": gradient(model)}


def _diverged(loss_of: Any, beta: float) -> dict[str, Any]:
    """Return the results of a function for distillation, and gradients of the student."""
    student, weight, bias = normal(2, 3, 8), normal(11, 8, seed=1), normal(11, seed=2)
    teacher, teacher_weight = normal(2, 3, 4, seed=3).detach(), normal(11, 4, seed=4).detach()
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]])
    loss, entropy, count = loss_of(
        student, teacher, weight, teacher_weight, mask, beta, num_items_in_batch=7,
        student_lm_head_bias=bias, student_logit_scale=0.5, teacher_logit_scale=0.8,
        student_final_logit_softcapping=3.0, teacher_final_logit_softcapping=4.0, temperature=0.7,
    )  # fmt: skip
    found = gradients(loss, hidden=student, weight=weight, bias=bias)
    return {"loss": loss, "entropy": entropy, "number of tokens": count, **found}


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
    """Do what TRL's function of this name does: ``model(..., fused_lm_head=True)`` scores labels.

    A head that ours cannot express and a model that another adapter has changed are ValueErrors.
    """
    unknown = sorted(set(outputs) - set(_OUTPUTS))
    if unknown:
        raise ValueError(f"outputs: expected some of {', '.join(_OUTPUTS)}; got {unknown}")
    layer = model.get_output_embeddings()
    head_of_layer(layer, Transform())  # for its checks
    if cast_lm_head_to_fp32:
        if hasattr(layer, "base_layer"):
            raise ValueError(
                "cast_lm_head_to_fp32: expected False with an adapter on lm_head, got True"
            )
        vars(layer).pop("forward", None)  # TRL's own cast
        keep_head_in_fp32(model)
    claim(model, "trl")
    add_fused_head(model)
    apply_overlay(_ScoresLabels, model)
    asked = tuple(_OUTPUTS[name] for name in {"log_probs", *outputs})
    model._grpo_scores = {"temperature": temperature, "outputs": asked}


class _ScoresLabels(ForwardOverlay):
    """What :func:`add_fused_lm_head` makes of a model."""

    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        own_forward = super().forward
        if not fused_lm_head:
            return own_forward(*args, **kwargs)
        labels, shifted, count = (
            kwargs.pop(name, None) for name in ("labels", "shift_labels", "num_items_in_batch")
        )
        target = labels[:, 1:] if shifted is None else shifted

        def per_token(hidden: Tensor, head: Head) -> LinearLogprobs:
            rows, ids = hidden[:, :-1] if shifted is None else hidden, target.to(hidden.device)
            return linear_logprobs(rows, head, ids, **self._grpo_scores)

        config = self.config.get_text_config()
        if getattr(config, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        output = own_forward(*args, head_fn=per_token, **kwargs)
        found = {name: getattr(output.head, own) for name, own in _OUTPUTS.items()}
        mask, aux_loss = target.to(found["log_probs"].device) != -100, output.aux_loss
        if (squares := found["log_sum_sq_probs"]) is not None:
            found["log_sum_sq_probs"] = squares.masked_fill(~mask, 1.0).log()
        loss = -found["log_probs"].sum() / (mask.sum().clamp(min=1) if count is None else count)
        if aux_loss is not None:
            loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        theirs = import_module("trl.trainer.utils").FusedCausalLMOutput
        return theirs(loss=loss, label_mask=mask, aux_loss=aux_loss, **found)


def chunked_divergence_loss(
    student_hidden_states: Tensor,  # (B, K, D)
    teacher_hidden_states: Tensor,  # (B, K, D_t)
    student_lm_head_weight: Tensor,  # (V, D)
    teacher_lm_head_weight: Tensor,  # (V, D_t)
    completion_mask: Tensor,  # (B, K)
    beta: float,
    num_items_in_batch: Tensor | int | None = None,  # what to divide by; None: the valid tokens
    student_lm_head_bias: Tensor | None = None,
    teacher_lm_head_bias: Tensor | None = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what TRL's function of this name does: loss, sum of entropies, number of valid tokens."""
    student_transform = Transform(student_logit_scale, student_final_logit_softcapping)
    teacher_transform = Transform(teacher_logit_scale, teacher_final_logit_softcapping)
    student = Head(student_lm_head_weight, student_lm_head_bias, student_transform)
    teacher = Head(teacher_lm_head_weight, teacher_lm_head_bias, teacher_transform)
    mask = completion_mask != 0
    valid = mask.sum()
    weights, items = None, num_items_in_batch
    if items is not None:  # not a factor of the loss: gradients would be rounded twice
        items = items.to(mask.device) if isinstance(items, Tensor) else items
        weights = (valid / items).expand(mask.shape)
    # the student's is gathered as all that ZeRO-3 trains are; nobody else gathers the teacher's
    gathered = import_module("trl.trainer.utils").maybe_gather_lm_head_ctx
    with gathered(teacher.weight, teacher.bias):
        found = divergence_of(
            beta, student_hidden_states, student, teacher_hidden_states, teacher,
            mask=mask, temperature=temperature, weights=weights,
        )  # fmt: skip
    return found.loss, found.entropy.sum(), valid


def __getattr__(name: str) -> Any:
    # TRL is imported by those who use it
    if name != "FusedGRPOTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("grpo_kernels.integrations.trl_trainer").FusedGRPOTrainer
