"""Trainers that score logits by functions of their own, made to take logits that are not formed.

    from grpo_kernels.integrations import lazy_scorers

    lazy_scorers.enable(actor.model, "openrlhf")

Where they score real tensors, their functions are called as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from grpo_kernels.fused_head import FusedHead, unfuse
from grpo_kernels.integrations.lazy_logits import LazyLogits
from grpo_kernels.integrations.switch import HOSTS, Replacement, Switch, claim, module_of, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Scorer(NamedTuple):
    """A function of a host, and what does the same for LazyLogits, with the same arguments."""

    module: str
    name: str
    ours: Callable[..., Any]  # NotImplemented: the host's own has to


def _selective_log_softmax(logits: LazyLogits, index: Tensor) -> Any:
    if index.dim() == logits.dim() - 1:
        return logits.logprobs(index)
    if index.shape[-1] != 1:
        return NotImplemented
    return logits.logprobs(index.squeeze(-1)).unsqueeze(-1)


def _entropy_from_logits(logits: LazyLogits, chunk_size: int = 0) -> Tensor:
    return logits.entropy()


def _log_probs_from_logits(logits: LazyLogits, labels: Tensor, temperature: float = 1.0) -> Tensor:
    logits.div_(temperature)  # theirs changes them, too
    return logits.logprobs(labels)


def _logprobs_from_logits(
    logits: LazyLogits, labels: Tensor, inplace_backward: bool = True
) -> Tensor:
    return logits.logprobs(labels)


def _chunked_entropy_from_logits(
    logits: LazyLogits,
    requires_grad: bool = False,
    attention_mask: Tensor | None = None,
    chunk_size: int = 0,
) -> Tensor:
    with nullcontext() if requires_grad else torch.no_grad():
        entropy = logits.entropy()
    return entropy if attention_mask is None else entropy * attention_mask


_OF_TRL = "trl.trainer.utils"
_OF_OPENRLHF = "openrlhf.models.utils"
_OF_SKYRL = "skyrl.backends.skyrl_train.utils.torch_utils"
_SCORERS = {
    "trl": (
        _Scorer(_OF_TRL, "selective_log_softmax", _selective_log_softmax),
        _Scorer(_OF_TRL, "entropy_from_logits", _entropy_from_logits),
    ),
    "openrlhf": (
        _Scorer(_OF_OPENRLHF, "log_probs_from_logits", _log_probs_from_logits),
        _Scorer(_OF_OPENRLHF, "compute_entropy", _entropy_from_logits),
    ),
    "skyrl": (
        _Scorer(_OF_SKYRL, "logprobs_from_logits", _logprobs_from_logits),
        _Scorer(_OF_SKYRL, "chunked_entropy_from_logits", _chunked_entropy_from_logits),
    ),
}


def _replacements(scorers: tuple[_Scorer, ...]) -> Iterator[Replacement]:
    for module, name, ours in scorers:
        owner = module_of(module)
        taking_both = _taking_both(getattr(owner, name), ours)
        yield Replacement(owner, name, taking_both, everywhere=True)


def _taking_both(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def score(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            return theirs(logits, *args, **kwargs)
        if logits.real is not None:  # somebody needed them as such
            return theirs(logits.real, *args, **kwargs)
        found = ours(logits, *args, **kwargs)
        return theirs(logits.formed(), *args, **kwargs) if found is NotImplemented else found

    return score


def defer_logits(model: PreTrainedModel) -> None:
    """Let the LM head of ``model`` return :class:`LazyLogits`. Doing it twice is harmless.

    Raises:
        ValueError: there is no head, another forward than its class's is in its place, or another
            adapter has changed the model.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model: expected one with output embeddings, got {type(model).__name__}")
    if are_deferred(model):
        return
    was_fused = isinstance(layer, FusedHead)
    head = layer if was_fused else FusedHead(layer)
    claim(model, "lazy_scorers")
    vars(head).update(_instead_of_logits=LazyLogits.of, _fused_for_lazy=not was_fused)


def form_logits(model: PreTrainedModel) -> None:
    """Let it return its logits again, of the layer that it was. Without effect while it does."""
    if are_deferred(model):
        head = model.get_output_embeddings()
        release(model)
        del vars(head)["_instead_of_logits"]
        if vars(head).pop("_fused_for_lazy"):
            unfuse(head)


def are_deferred(model: PreTrainedModel) -> bool:
    """Return whether the head of ``model`` returns :class:`LazyLogits`."""
    layer = model.get_output_embeddings()
    return layer is not None and "_instead_of_logits" in vars(layer)


SWITCHES = {
    name: Switch(HOSTS[f"lazy_scorers, {name}"], functools.partial(_replacements, scorers))
    for name, scorers in _SCORERS.items()
}
_MODELS: dict[str, WeakSet[PreTrainedModel]] = {name: WeakSet() for name in SWITCHES}


def enable(model: PreTrainedModel, host: str, *, any_version: bool = False) -> None:
    """Let the LM head of ``model`` return LazyLogits, and ``host`` score them by our kernels.

    Args:
        model: a transformers model; doing it twice is harmless, and so are several models.
        host: "trl" (before 1.12, and for ms-swift), "openrlhf" or "skyrl" (its FSDP workers).
        any_version: also with a version of the host that was not tested.

    Raises:
        ImportError: the host is not installed, or in another version.
        ValueError: ``host`` is unknown, or the model has no head that can do it.
    """
    if host not in SWITCHES:
        raise ValueError(f"host: expected one of {', '.join(SWITCHES)}; got {host!r}")
    SWITCHES[host].enable(any_version=any_version)
    _MODELS[host].add(model)
    try:
        defer_logits(model)
    except ValueError:
        disable(model)
        raise


def disable(model: PreTrainedModel) -> None:
    """Let it return logits again; with the last model of a host, its scorers are put back."""
    if model.get_output_embeddings() is not None:
        form_logits(model)
    for host, models in _MODELS.items():
        models.discard(model)
        if not models:
            SWITCHES[host].disable()


@contextmanager
def enabled(model: PreTrainedModel, host: str, *, any_version: bool = False) -> Iterator[None]:
    """Have it so within a ``with``; one that is so already stays so."""
    before = model in _MODELS.get(host, ())
    enable(model, host, any_version=any_version)
    try:
        yield
    finally:
        if not before:
            disable(model)
