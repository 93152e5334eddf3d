"""Logits that are not formed: for trainers and scripts that take log-probabilities of ``.logits``.

    from grpo_kernels.integrations import lazy_logits

    with lazy_logits.enabled(model):
        logits = model(input_ids).logits[:, :-1] / temperature   # a LazyLogits: no (B, L, V) tensor
        logp = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)   # by our kernels

The head returns a handle with its hidden states. Slices, shapes, casts, scales and softcaps are
remembered; ``log_softmax`` with ``gather``, and ``cross_entropy``, call the head again with ids, as
a module, so that FSDP2 knows. Anything else is done with real logits, and says so once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import get_default_nowrap_functions
from torch.utils._pytree import tree_map

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.head import Head, Transform
from grpo_kernels.integrations.switch import claim, release
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_IGNORED = -100


def enable(model: PreTrainedModel) -> None:
    """Let the LM head of ``model`` return :class:`LazyLogits`. Doing it twice is harmless.

    Raises:
        ValueError: there is no head, another forward than its class's is in its place, or another
            adapter has changed the model.
    """
    layer = model.get_output_embeddings()
    if layer is None:
        raise ValueError(f"model: expected one with output embeddings, got {type(model).__name__}")
    head = FusedHead(layer)
    claim(model, "lazy_logits")
    vars(head)["_instead_of_logits"] = _lazy


def disable(model: PreTrainedModel) -> None:
    """Let it return its logits again. Without effect while it does."""
    if is_enabled(model):
        release(model)
        del vars(model.get_output_embeddings())["_instead_of_logits"]


def is_enabled(model: PreTrainedModel) -> bool:
    """Return whether the head of ``model`` returns :class:`LazyLogits`."""
    return "_instead_of_logits" in vars(model.get_output_embeddings())


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
    return LazyLogits(_Recipe(layer, hidden))


@dataclass(frozen=True)
class _Recipe:
    """How to make the logits: those of a layer, ``tanh`` of them if capped, over a temperature."""

    layer: Any  # a FusedHead
    hidden: Tensor  # (..., D)
    scale: float = 1.0
    capped: bool = False
    temperature: float | Tensor = 1.0  # or one per row, (..., 1)
    normalised: bool = False  # log_softmax has been taken
    dtype: torch.dtype | None = None  # None: of the hidden states
    detached: bool = False

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.layer.out_features))

    def rows(self, change: Callable[[Tensor], Tensor]) -> _Recipe:
        """Return the same for other rows: ``change`` takes (..., n) tensors of the rows."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = change(temperature.expand(*self.hidden.shape[:-1], 1))
        return replace(self, hidden=change(self.hidden), temperature=temperature)

    def divided(self, by: Any) -> _Recipe | None:
        """Return the recipe of the logits over ``by``; None if there is none."""
        if self.normalised or not _is_per_row(by, self.shape):
            return None
        by = by.detach() if isinstance(by, Tensor) else by
        if isinstance(by, Tensor) and by.numel() == 1:
            by = float(by)
        if not isinstance(by, Tensor) and not (by > 0 and math.isfinite(by)):
            return None
        return replace(self, temperature=self.temperature * by)

    def bounded(self) -> _Recipe | None:
        """Return the recipe of their tanh."""
        if self.capped or self.normalised or isinstance(self.temperature, Tensor):
            return None
        return replace(self, scale=self.scale / self.temperature, capped=True, temperature=1.0)

    def score(self, ids: Tensor, *outputs: str) -> LinearLogprobs:
        """Call the head with ids (...)."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.expand(*ids.shape, 1).squeeze(-1)

        def fn(hidden: Tensor, head: Head) -> LinearLogprobs:
            head = replace(head, transform=Transform(self.scale, 1.0 if self.capped else None))
            out = linear_logprobs(hidden, head, ids, temperature=temperature, outputs=outputs)
            return LinearLogprobs(*(None if x is None else x.clone() for x in out))

        with torch.no_grad() if self.detached else nullcontext():
            return self.layer(self.hidden, fn)

    def logits(self) -> Tensor:
        """Return them as they would have been."""
        with torch.no_grad() if self.detached else nullcontext():
            logits = nn.Module.__call__(self.layer, self.hidden)
            if self.dtype is not None:
                logits = logits.to(self.dtype)
            if self.scale != 1:
                logits = logits * self.scale
            logits = (logits.tanh() if self.capped else logits) / self.temperature
            return logits.log_softmax(-1) if self.normalised else logits


class LazyLogits(Tensor):
    """Logits (..., V), or their log-softmax, that are formed when somebody needs them as such."""

    recipe: _Recipe
    kept: Tensor | None  # the real logits, once they are formed

    @staticmethod
    def __new__(cls, recipe: _Recipe) -> LazyLogits:
        hidden = recipe.hidden
        made = Tensor._make_wrapper_subclass(
            cls, recipe.shape, dtype=recipe.dtype or hidden.dtype, device=hidden.device
        )
        made.recipe, made.kept = recipe, None
        return made

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return log p of ``ids`` (...), fp32, -100 giving 0; differentiable."""
        found = self.recipe.score(ids, "logprobs").logprobs
        assert found is not None
        return found

    def entropy(self) -> Tensor:
        """Return the entropy (...) in nats, fp32, differentiable."""
        ids = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        found = self.recipe.score(ids, "entropy").entropy
        assert found is not None
        return found

    def formed(self) -> Tensor:
        """Return real logits; from then on this is what the handle stands for."""
        if self.kept is None:
            self.kept = self.recipe.logits()
        return self.kept

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _OF_NO_VALUE or func in get_default_nowrap_functions():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        first = args[0] if args else None
        if handler is not None and isinstance(first, LazyLogits) and first.kept is None:
            found = handler(first, *args[1:], **kwargs)
            if found is not NotImplemented:
                return found
        _tell(func)
        args, kwargs = tree_map(
            lambda x: x.formed() if isinstance(x, LazyLogits) else x, (args, kwargs)
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it otherwise
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise TypeError(f"LazyLogits: expected a function of torch's Python interface, got {func}")


_METHODS = (
    "size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point",
    "is_complex", "__len__", "get_device",
)  # fmt: skip
_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout")
_OF_NO_VALUE = {getattr(Tensor, name) for name in _METHODS}
_OF_NO_VALUE |= {getattr(Tensor, name).__get__ for name in _PROPERTIES}


def _tell(func: Any) -> None:
    if torch.is_grad_enabled():  # while sampling they cost what they always do
        warnings.warn(
            f"LazyLogits: {getattr(func, '__name__', func)} needs the (tokens, vocabulary) logits, "
            "which are formed; score with log_softmax and gather, cross_entropy, or .logprobs(ids)",
            stacklevel=4,
        )


def _is_per_row(x: Any, shape: torch.Size) -> bool:
    """Return whether ``x`` is a number, or a tensor of numbers for the rows of such logits."""
    if not isinstance(x, Tensor):
        return isinstance(x, int | float)
    return x.numel() == 1 or (x.dim() <= len(shape) and x.shape[-1] == 1)


def _of(recipe: _Recipe | None) -> Any:
    return NotImplemented if recipe is None else LazyLogits(recipe)


def _index(x: LazyLogits, index: Any) -> Any:
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(entry, LazyLogits) for entry in entries):
        return NotImplemented
    used = sum(
        entry.dim() if isinstance(entry, Tensor) and entry.dtype == torch.bool else 1
        for entry in entries
        if entry is not None and entry is not Ellipsis
    )
    # the vocabulary stays whole
    reaches = used == x.dim() or (Ellipsis in entries and entries[-1] is not Ellipsis)
    if reaches and entries[-1] != slice(None):
        return NotImplemented
    return _of(x.recipe.rows(lambda rows: rows[index]))


def _reshape(x: LazyLogits, *shape: Any) -> Any:
    sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
    if not sizes or sizes[-1] not in (x.shape[-1], -1):
        return NotImplemented
    # -1 is the vocabulary if the others are the rows
    if sizes[-1] == -1 and math.prod(sizes[:-1]) != math.prod(x.shape[:-1]):
        return NotImplemented
    return _of(x.recipe.rows(lambda rows: rows.reshape(*sizes[:-1], rows.shape[-1])))


def _flatten(x: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    if end_dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return _of(x.recipe.rows(lambda rows: rows.flatten(start_dim, end_dim)))


def _squeeze(x: LazyLogits, dim: int | None = None) -> Any:
    if dim is None or dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return _of(x.recipe.rows(lambda rows: rows.squeeze(dim)))


def _unsqueeze(x: LazyLogits, dim: int) -> Any:
    if dim % (x.dim() + 1) == x.dim():
        return NotImplemented
    return _of(x.recipe.rows(lambda rows: rows.unsqueeze(dim)))


def _unbind(x: LazyLogits, dim: int = 0) -> Any:
    if dim % x.dim() == x.dim() - 1:
        return NotImplemented
    return tuple(
        LazyLogits(x.recipe.rows(lambda rows, i=i: rows.select(dim, i)))  # type: ignore[misc]
        for i in range(x.shape[dim])
    )


def _to(x: LazyLogits, *args: Any, **kwargs: Any) -> Any:
    dtypes = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
    others = [value for value in args if not isinstance(value, torch.dtype | bool)]
    others += [v for k, v in kwargs.items() if k not in ("dtype", "copy", "non_blocking")]
    if any(torch.device(other) != x.device for other in others if other is not None):
        return NotImplemented
    return _cast(x, dtypes[0]) if dtypes else x


def _cast(x: LazyLogits, dtype: torch.dtype) -> Any:
    return _of(replace(x.recipe, dtype=dtype))


def _same(x: LazyLogits, **_: Any) -> LazyLogits:
    return LazyLogits(x.recipe)


def _divide(x: LazyLogits, other: Any) -> Any:
    return _of(x.recipe.divided(other))


def _multiply(x: LazyLogits, other: Any) -> Any:
    if not _is_per_row(other, x.shape) or (not isinstance(other, Tensor) and other == 0):
        return NotImplemented
    return _of(x.recipe.divided(1 / other))


def _in_place(handler: Callable[..., Any]) -> Callable[..., Any]:
    def change(x: LazyLogits, other: Any) -> Any:
        found = handler(x, other)
        if found is NotImplemented:
            return found
        x.recipe = found.recipe
        return x

    return change


def _tanh(x: LazyLogits) -> Any:
    return _of(x.recipe.bounded())


def _log_softmax(x: LazyLogits, dim: int | None = None, dtype: Any = None, **_: Any) -> Any:
    if dim is None or dim % x.dim() != x.dim() - 1 or x.recipe.normalised:
        return NotImplemented
    return _of(replace(x.recipe, normalised=True, dtype=dtype or x.dtype))


def _gather(x: LazyLogits, dim: int, index: Tensor, **_: Any) -> Any:
    alone = index.shape == (*x.shape[:-1], 1)
    if not alone or dim % x.dim() != x.dim() - 1 or not x.recipe.normalised:
        return NotImplemented
    return x.logprobs(index.squeeze(-1)).unsqueeze(-1)


def _cross_entropy(
    x: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = _IGNORED,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or x.dim() != 2 or x.recipe.normalised or target.shape != x.shape[:1]:
        return NotImplemented
    counts = target != ignore_index
    each = -x.logprobs(torch.where(counts, target, _IGNORED))
    if reduction == "none":
        return each
    return each.sum() / (counts.sum() if reduction == "mean" else 1)


_HANDLERS: dict[str, Callable[..., Any]] = {
    "__getitem__": _index,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "unbind": _unbind,
    "__iter__": lambda x: iter(_unbind(x)),
    "to": _to,
    "float": lambda x, **_: _cast(x, torch.float32),
    "bfloat16": lambda x, **_: _cast(x, torch.bfloat16),
    "half": lambda x, **_: _cast(x, torch.float16),
    "contiguous": _same,
    "clone": _same,
    "detach": lambda x: _of(replace(x.recipe, hidden=x.recipe.hidden.detach(), detached=True)),
    "div": _divide,
    "__truediv__": _divide,
    "true_divide": _divide,
    "div_": _in_place(_divide),
    "__itruediv__": _in_place(_divide),
    "mul": _multiply,
    "__mul__": _multiply,
    "__rmul__": _multiply,
    "mul_": _in_place(_multiply),
    "__imul__": _in_place(_multiply),
    "tanh": _tanh,
    "log_softmax": _log_softmax,
    "gather": _gather,
    "cross_entropy": _cross_entropy,
}
assert functional.cross_entropy.__name__ in _HANDLERS
