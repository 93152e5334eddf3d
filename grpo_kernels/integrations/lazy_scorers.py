"""Trainers that score logits by functions of their own, made to take logits that are not formed.

    from grpo_kernels.integrations import lazy_scorers

    lazy_scorers.enable(actor.model, "openrlhf")

Where they score real tensors, their functions are called as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from grpo_kernels.fused_head import FusedHead, unfuse
from grpo_kernels.integrations.lazy_logits import LazyLogits
from grpo_kernels.integrations.switch import HOSTS, Replacement, Switch, claim, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _selective_log_softmax(logits: LazyLogits, index: Tensor, **_: Any) -> Any:
    if index.dim() == logits.dim() - 1:
        return logits.logprobs(index)
    if index.shape[-1] != 1:
        return NotImplemented
    return logits.logprobs(index.squeeze(-1)).unsqueeze(-1)


def _logprobs(logits: LazyLogits, labels: Tensor, temperature: float = 1.0, **_: Any) -> Tensor:
    if temperature != 1:
        logits.div_(temperature)  # theirs changes them, too
    return logits.logprobs(labels)


def _entropy(
    logits: LazyLogits,
    requires_grad: bool = True,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Tensor:
    with torch.set_grad_enabled(requires_grad and torch.is_grad_enabled()):
        entropy = logits.entropy()
    return entropy if attention_mask is None else entropy * attention_mask


# by host: the module of its scorers; by the name of each, what does the same for LazyLogits. That
# takes those of its arguments that matter, and returns NotImplemented where the host's own has to.
_SCORERS: dict[str, tuple[str, dict[str, Callable[..., Any]]]] = {
    "trl": (
        "trl.trainer.utils",
        {"selective_log_softmax": _selective_log_softmax, "entropy_from_logits": _entropy},
    ),
    "openrlhf": (
        "openrlhf.models.utils",
        {"log_probs_from_logits": _logprobs, "compute_entropy": _entropy},
    ),
    "skyrl": (
        "skyrl.backends.skyrl_train.utils.torch_utils",
        {"logprobs_from_logits": _logprobs, "chunked_entropy_from_logits": _entropy},
    ),
}


def _replacements(host: str) -> Iterator[Replacement]:
    module, scorers = _SCORERS[host]
    owner = import_module(module)
    for name, ours in scorers.items():
        taking_both = _taking_both(getattr(owner, name), ours)
        yield Replacement(owner, name, taking_both, everywhere=True)


def _taking_both(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(theirs)

    @functools.wraps(theirs)
    def score(logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(logits, LazyLogits):
            return theirs(logits, *args, **kwargs)
        found: Any = NotImplemented
        if logits.real is None:  # else somebody needed them as such
            given = signature.bind(logits, *args, **kwargs)
            given.apply_defaults()
            _, *names = given.arguments
            found = ours(logits, **{name: given.arguments[name] for name in names})
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


def are_deferred(model: PreTrainedModel) -> bool:
    """Return whether the head of ``model`` returns :class:`LazyLogits`."""
    layer = model.get_output_embeddings()
    return layer is not None and "_instead_of_logits" in vars(layer)


SWITCHES = {
    name: Switch(HOSTS[f"lazy_scorers, {name}"], functools.partial(_replacements, name))
    for name in _SCORERS
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
    if are_deferred(model):
        head = model.get_output_embeddings()
        release(model)
        del vars(head)["_instead_of_logits"]
        if vars(head).pop("_fused_for_lazy"):
            unfuse(head)
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
