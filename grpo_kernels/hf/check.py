"""Compares the fused head's idea of a model with the model's own logits, before it is trusted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from grpo_kernels.head import Head
from grpo_kernels.hf.lm_head import fused_head
from grpo_kernels.hf.patch import backbone

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 4
_LARGE = 64.0  # logits of this size show every softcap in use
_TOLERANCE = {torch.float16: 0.02, torch.bfloat16: 0.03}  # of the largest logit; fp32: below
_TIGHT = 1e-3


def check_fused_head(model: PreTrainedModel, wrapper: nn.Module | None = None) -> None:
    """Raise unless the fused head of ``model`` describes how it makes its logits.

    Two forwards over a few tokens: the model's own, and one with ``head_fn``. In both the last
    hidden states are enlarged until the logits are large, so that a scale, a bound, a bias or a
    step between backbone and head that is not understood shows whatever the weights are.

    Args:
        model: one that :func:`add_fused_head` was applied to, where its weights are in use.
        wrapper: what is called to run it (PEFT's, FSDP's, DeepSpeed's), once it is sharded.

    Raises:
        ValueError: the logits differ.
    """
    device = model.get_input_embeddings().weight.device
    ids = torch.full((1, _TOKENS), _some_token(model), device=device)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runs = model if wrapper is None else wrapper
    with torch.no_grad(), _evaluating(model), _enlarged(model) as enlarge:
        own = runs(**batch, use_cache=False).logits
        enlarge.repeat()
        seen = _Seen()
        runs(**batch, head_fn=seen)
    fused = seen.logits
    if own.shape != fused.shape:
        difference = f"shape {tuple(own.shape)} against {tuple(fused.shape)}"
    else:
        error = (own.to(fused) - fused).abs().max() / fused.abs().max()
        if error <= _TOLERANCE.get(own.dtype, _TIGHT):
            return
        difference = f"a relative error of {float(error):.1e}"
    raise ValueError(
        f"model: expected logits softcap * tanh(scale * (W h + b) / softcap) of the last hidden "
        f"states, as its config declares them, but {type(model).__name__} makes others "
        f"({difference}): its head is not supported"
    )


class _Enlarge:
    """Hook on the backbone: multiplies the last hidden states by a power of two."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._factor: float | None = None
        self._repeating = False

    def repeat(self) -> None:
        """Reuse the factor of the first forward from here on; 1 if that forward did not set one."""
        self._repeating = True

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        hidden = output.last_hidden_state
        if self._factor is None:
            self._factor = 1.0 if self._repeating else self._to_large_logits(hidden)
        output.last_hidden_state = hidden * self._factor
        return output

    def _to_large_logits(self, hidden: Tensor) -> float:
        largest = fused_head(self._model)(hidden, _largest_logit)
        return float(torch.exp2((_LARGE / largest.float().clamp(min=1e-6)).log2().round()))


@contextmanager
def _enlarged(model: PreTrainedModel) -> Iterator[_Enlarge]:
    hook = _Enlarge(model)
    handle = backbone(model).register_forward_hook(hook)
    try:
        yield hook
    finally:
        handle.remove()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and leave the random state as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.train(was_training)


def _raw_logits(hidden: Tensor, head: Head) -> Tensor:
    hidden = hidden.float()
    logits = linear(hidden, head.weight.float(), None if head.bias is None else head.bias.float())
    if head.lora is None:
        return logits
    inner = linear(hidden, head.lora.a.float()) * head.lora.scaling
    return logits + linear(inner, head.lora.b.float())


def _largest_logit(hidden: Tensor, head: Head) -> Tensor:
    return _raw_logits(hidden, head).abs().max() * head.transform.logit_scale


class _Seen:
    """Forms the logits and keeps them from hooks on the head, which would change a loss as well."""

    def __call__(self, hidden: Tensor, head: Head) -> Tensor:
        self.logits = _eager_logits(hidden, head)
        return self.logits


def _eager_logits(hidden: Tensor, head: Head) -> Tensor:
    transform = head.transform
    logits = _raw_logits(hidden, head) * transform.logit_scale
    bound = transform.softcap
    return logits if bound is None else bound * torch.tanh(logits / bound)


def _some_token(model: PreTrainedModel) -> int:
    """Return a token that stands for text; the padding token's embedding may be zero."""
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")]
    padding = getattr(config, "pad_token_id", None)
    return next(x for x in (*named, 1, 0) if isinstance(x, int) and x != padding)
