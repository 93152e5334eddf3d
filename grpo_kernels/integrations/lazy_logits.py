"""Logits that are not formed: for trainers and scripts that take log-probabilities of ``.logits``.

    from grpo_kernels.integrations import lazy_logits

    with lazy_logits.enabled(model):
        logits = model(input_ids).logits[:, :-1] / temperature   # a LazyLogits: no (B, L, V) tensor
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)   # by our kernels

The head returns a handle with its hidden states. What is known to be exact without logits is
remembered: slices of rows, shapes, casts, positive factors, softcaps; ``log_softmax`` with
``gather``, and ``cross_entropy``, call the head again with ids, as a module, so that FSDP2 knows.
Anything else is done with real logits, which all that share them then have, and says so once.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_leaves, tree_map

from grpo_kernels.batch import IGNORE_INDEX
from grpo_kernels.fused_head import FusedHead, unfuse
from grpo_kernels.head import stats_dtype
from grpo_kernels.integrations.lazy_recipe import CHANGES, COPIES, SCORES, VIEWS, Recipe
from grpo_kernels.integrations.switch import claim, release

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def enable(model: PreTrainedModel) -> None:
    """Let the LM head of ``model`` return :class:`LazyLogits`. Doing it twice is harmless.

    Raises:
        ValueError: there is no head, another forward than its class's is in its place, or another
            adapter has changed the model.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model: expected one with output embeddings, got {type(model).__name__}")
    if is_enabled(model):
        return
    was_fused = isinstance(layer, FusedHead)
    head = layer if was_fused else FusedHead(layer)
    claim(model, "lazy_logits")
    vars(head).update(_instead_of_logits=_lazy, _fused_for_lazy=not was_fused)


def disable(model: PreTrainedModel) -> None:
    """Let it return its logits again, of the layer that it was. Without effect while it does."""
    if is_enabled(model):
        head = model.get_output_embeddings()
        release(model)
        del vars(head)["_instead_of_logits"]
        if vars(head).pop("_fused_for_lazy"):
            unfuse(head)


def is_enabled(model: PreTrainedModel) -> bool:
    """Return whether the head of ``model`` returns :class:`LazyLogits`."""
    layer = model.get_output_embeddings()
    return layer is not None and "_instead_of_logits" in vars(layer)


@contextmanager
def enabled(model: PreTrainedModel) -> Iterator[None]:
    """Have it so within a ``with``; one that is so already stays so."""
    before = is_enabled(model)
    enable(model)
    try:
        yield
    finally:
        if not before:
            disable(model)


def _lazy(layer: nn.Module, hidden: Tensor) -> LazyLogits:
    return LazyLogits(Recipe(layer, hidden, hidden.dtype, not torch.is_grad_enabled()))


@dataclass(eq=False)
class _Value:
    """What a handle stands for: a recipe, and real logits once somebody needs them."""

    recipe: Recipe
    form: Callable[[], Tensor]
    kept: Tensor | None = None
    changed: bool = False  # in place, through another one that may share memory


class LazyLogits(Tensor):
    """Logits (..., V), or their log-softmax, that are formed when somebody needs them as such."""

    value: _Value
    memory: list[_Value]  # all that may share it, in the order in which they were made

    @staticmethod
    def __new__(
        cls,
        recipe: Recipe,
        form: Callable[[], Tensor] | None = None,
        memory: list[_Value] | None = None,
    ) -> LazyLogits:
        made = Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype, device=recipe.hidden.device,
            requires_grad=not recipe.detached,
        )  # fmt: skip
        if not recipe.detached:
            with torch._C.DisableTorchFunctionSubclass():
                made.register_hook(_refuse_gradient)
        made.memory = [] if memory is None else memory
        made._become(_Value(recipe, form or recipe.logits))
        return made

    @property
    def recipe(self) -> Recipe:
        """What they are made of, while they are not formed."""
        return self.value.recipe

    @property
    def kept(self) -> Tensor | None:
        """The real logits, if they are formed or have to be. They may have been changed since."""
        return self.formed() if self.value.changed else self.value.kept

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return log p of ``ids`` (...), fp32, -100 giving 0; differentiable."""
        if self.kept is None:
            return self.recipe.score(ids, "logprobs")
        counts = ids != IGNORE_INDEX
        places = ids.where(counts, 0).unsqueeze(-1)
        return _log_softmax(self.kept).gather(-1, places).squeeze(-1).where(counts, 0.0)

    def entropy(self) -> Tensor:
        """Return the entropy (...) in nats, fp32, differentiable."""
        if self.kept is None:
            ids = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
            return self.recipe.score(ids, "entropy")
        logp = _log_softmax(self.kept)
        p = logp.exp()
        return -(p * logp.masked_fill(p == 0, 0.0)).sum(-1)

    def formed(self) -> Tensor:
        """Return real logits; from then on all that may share their memory stand for such."""
        for value in self.memory:
            if value.kept is None:
                with torch.set_grad_enabled(not value.recipe.detached):
                    value.kept = value.form()
        assert self.value.kept is not None
        return self.value.kept

    def _become(self, value: _Value) -> None:
        self.value = value
        self.memory.append(value)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.value.kept is None:
            if func == _REQUIRES_GRAD:
                return False  # whoever asks would hook on to it
            if func in _OF_NO_VALUE or func in get_default_nowrap_functions():
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            found = first._without_logits(func, args[1:], kwargs)
            if found is not NotImplemented:
                return found
        _tell(func, [x for x in tree_leaves((args, kwargs)) if isinstance(x, LazyLogits)])
        args, kwargs = tree_map(
            lambda x: x.formed() if isinstance(x, LazyLogits) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    def _without_logits(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``func`` gives; NotImplemented unless that is known to be exact."""
        name = getattr(func, "__name__", "")
        handler = _HANDLERS.get(name)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        records = torch.is_grad_enabled()
        learned = records and any(x.requires_grad for x in tensors)
        several = any(isinstance(x, LazyLogits) for x in tensors)
        if handler is None or self.value.changed or learned or several:
            return NotImplemented
        if not _takes(handler, self.recipe, *args, **kwargs):
            return NotImplemented
        recipe = handler(self.recipe, *args, **kwargs)
        if not isinstance(recipe, Recipe):
            return recipe
        if recipe is self.recipe and name in VIEWS:  # a cast to the dtype that they have
            return self
        if name in COPIES:
            return LazyLogits(replace(recipe, detached=recipe.detached or not records))
        before = self.value
        args, kwargs = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))

        def form() -> Tensor:
            found: Tensor = func(before.kept, *args, **kwargs)
            return found

        if name in CHANGES:
            return self._changed(recipe, form)
        recipe = replace(recipe, detached=recipe.detached or not records)
        return LazyLogits(recipe, form, self.memory)

    def _changed(self, recipe: Recipe, form: Callable[[], Tensor]) -> Any:
        """Change them in place; NotImplemented where they would have another dtype or gradient."""
        records = torch.is_grad_enabled() or recipe.detached  # else the gradient stays as it was
        if not records or recipe.dtype != self.dtype:
            return NotImplemented
        for value in self.memory:
            value.changed = True
        self._become(_Value(recipe, form))
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it otherwise
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise TypeError(f"LazyLogits: expected a function of torch's Python interface, got {func}")


_HANDLERS = VIEWS | COPIES | CHANGES | SCORES
_METHODS = (
    "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point",
    "is_complex", "__len__", "get_device",
)  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "ndim", "grad_fn", "is_cuda", "layout")
_OF_NO_VALUE = {getattr(Tensor, name) for name in _METHODS}
_OF_NO_VALUE |= {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_OF_NO_VALUE.add(torch.is_floating_point)
_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def _refuse_gradient(gradient: Tensor) -> None:
    raise RuntimeError(
        "LazyLogits: expected real logits for an autograd.Function or a reentrant checkpoint, "
        "whose gradient could not go on from here; give it logits.formed()"
    )


def _takes(handler: Any, *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(handler).bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _log_softmax(real: Tensor) -> Tensor:
    return real.log_softmax(-1, dtype=stats_dtype(real.dtype))


def _tell(func: Any, handles: list[LazyLogits]) -> None:
    # while sampling they cost what they always do
    if torch.is_grad_enabled() and any(x.value.kept is None for x in handles):
        warnings.warn(
            f"LazyLogits: {getattr(func, '__name__', func)} needs the (tokens, vocabulary) logits, "
            "which are formed; score with log_softmax and gather, cross_entropy, or .logprobs(ids)",
            stacklevel=4,
        )
