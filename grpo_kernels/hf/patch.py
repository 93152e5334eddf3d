"""Puts a fused head into a transformers model's own forward, so that wrappers and hooks fire."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from grpo_kernels.fused_head import HeadFn
from grpo_kernels.head import Head
from grpo_kernels.hf.lm_head import fuse_head, fused_head, runs_in_fp32
from grpo_kernels.hf.router import router_loss
from grpo_kernels.overlay import ForwardOverlay, lay_over

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_PATCHED = "_grpo_patched_forward"  # attribute: the forward that was set on a model before


def add_fused_head(model: PreTrainedModel) -> None:
    """Teach ``model`` the keyword argument ``head_fn``; call it before any wrapper is applied.

    ``model(input_ids=..., attention_mask=..., head_fn=fn)`` runs the backbone and returns a
    ``ModelOutput`` whose ``head`` is ``fn(hidden, Head)``, with ``hidden`` (B, L, D), in place of
    the logits. Without ``head_fn`` the forward is the model's own. Calling it twice is harmless.
    The output embeddings become a :class:`grpo_kernels.FusedHead`. Copies of the model have a head
    of their own.

    Raises:
        ValueError: the model has no output embeddings, or no separate backbone.
    """
    if isinstance(model, _TakesHeadFn):
        return
    if model.get_output_embeddings() is None:
        raise ValueError(
            f"model: expected a causal LM with output embeddings, got {type(model).__name__}"
        )
    backbone(model)
    fuse_head(model)
    if "forward" in vars(model):  # it would hide that of a class
        vars(model)[_PATCHED] = vars(model).pop("forward")
    lay_over(_TakesHeadFn, model)


def is_patched(model: PreTrainedModel) -> bool:
    """Return whether a forward was set on this model, other than by :func:`add_fused_head`."""
    return "forward" in vars(model) or _PATCHED in vars(model)


def drop_wrappers(model: PreTrainedModel) -> None:
    """Drop what was set around the forward of ``model`` since :func:`add_fused_head`, if that was
    called."""
    if isinstance(model, _TakesHeadFn):
        vars(model).pop("forward", None)


class _TakesHeadFn(ForwardOverlay):
    """What :func:`add_fused_head` makes of a model."""

    def forward(self, *args: Any, head_fn: HeadFn | None = None, **kwargs: Any) -> Any:
        if head_fn is not None:
            return _head_forward(self, head_fn, args, kwargs)
        own_forward = super().forward
        return vars(self).get(_PATCHED, own_forward)(*args, **kwargs)


def backbone(model: PreTrainedModel) -> nn.Module:
    """Return the part of ``model`` that gives the last hidden states.

    Raises:
        ValueError: there is none.
    """
    if model.base_model is not model:
        return model.base_model
    part = getattr(model, "model", None)  # Llama 4's text model, whose prefix names another part
    if not isinstance(part, nn.Module):
        raise ValueError(f"model: expected a model with a head, got {type(model).__name__}")
    return part


def _head_forward(
    model: PreTrainedModel, head_fn: HeadFn, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if kwargs.get("labels") is not None:
        raise ValueError("labels: expected None with head_fn (it makes the loss), got a value")
    # wrappers pass on every argument of a causal LM, as None where it was not given; a backbone
    # need not know it
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    kwargs["use_cache"] = False
    outputs = backbone(model)(*args, **kwargs)
    routers = None
    if kwargs.get("output_router_logits"):
        routers = router_loss(model, outputs, kwargs.get("attention_mask"))
    head = _call_head(model, outputs.last_hidden_state, head_fn)
    return _output_class()(aux_loss=routers, head=head)


def _call_head(model: PreTrainedModel, hidden: torch.Tensor, head_fn: HeadFn) -> Any:
    head = fused_head(model)
    if not runs_in_fp32(model):
        return head(hidden, head_fn)

    def exact(hidden: torch.Tensor, head: Head) -> Any:
        return head_fn(hidden.to(head.weight.dtype), head)

    with torch.autocast(hidden.device.type, enabled=False):
        return head(hidden, exact)


@functools.cache
def _output_class() -> type:
    # transformers is imported only by those who use it
    from transformers.utils import ModelOutput

    @dataclass
    class FusedHeadOutput(ModelOutput):
        """The result of ``head_fn``, and the routers' loss if their logits were asked for."""

        # the first field must not be `head`: a dict there is taken for the fields themselves
        aux_loss: torch.Tensor | None = None
        head: Any = None

    return FusedHeadOutput
