"""Recipe: what logits that are not formed are made of, and what torch's functions make of one.

A function here takes a recipe in the place of the logits, and returns the recipe of its result, or
its result. It returns NotImplemented for arguments with which that would not be exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.batch import IGNORE_INDEX
from grpo_kernels.fused_head import FusedHead, unfuse
from grpo_kernels.head import Head, Transform, stats_dtype
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs

_CASTS = (torch.float32, torch.bfloat16, torch.float16)
_NOT_AN_ID = -1  # the head refuses it, where torch refuses -100


@contextmanager
def _fused(layer: nn.Module) -> Iterator[FusedHead]:
    if isinstance(layer, FusedHead):
        yield layer
        return
    head = FusedHead(layer)
    try:
        yield head
    finally:
        unfuse(head)


@dataclass(frozen=True)
class Recipe:
    """How to make logits: those of a layer, ``tanh`` of them if capped, over a temperature."""

    layer: Any  # a FusedHead, unless they outlive disable()
    hidden: Tensor  # (..., D)
    dtype: torch.dtype
    detached: bool  # no gradient is recorded
    scale: float = 1.0
    capped: bool = False
    temperature: float | Tensor = 1.0  # or one per row, (..., 1) fp64
    normalised: bool = False  # log_softmax has been taken

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.layer.out_features))

    def logits(self) -> Tensor:
        """Return them as they would have been."""
        logits = nn.Module.__call__(self.layer, self.hidden).to(self.dtype)
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.to(stats_dtype(logits.dtype))
        if self.scale != 1:
            logits = logits * self.scale
        logits = (logits.tanh() if self.capped else logits) / temperature
        return (logits.log_softmax(-1) if self.normalised else logits).to(self.dtype)

    def score(self, ids: Tensor, output: str) -> Tensor:
        """Call the head with ids (...) for an output of ``linear_logprobs``."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = temperature.expand(*ids.shape, 1).squeeze(-1)

        def fn(hidden: Tensor, head: Head) -> LinearLogprobs:
            if head.weight.shape[0] != self.shape[-1]:
                raise ValueError(
                    f"model: expected a head that uses all {self.shape[-1]} columns of its logits, "
                    f"got vocab_size={head.weight.shape[0]}"
                )
            head = replace(head, transform=Transform(self.scale, 1.0 if self.capped else None))
            out = linear_logprobs(hidden, head, ids, temperature=temperature, outputs=(output,))
            return LinearLogprobs(*(None if x is None else x.clone() for x in out))

        records = torch.is_grad_enabled() and not self.detached
        with torch.set_grad_enabled(records), _fused(self.layer) as head:
            found: Tensor = getattr(head(self.hidden, fn), output)
            return found

    def rows(self, change: Callable[[Tensor], Tensor]) -> Recipe:
        """Return the same for other rows: ``change`` takes (..., n) tensors of the rows."""
        temperature = self.temperature
        if isinstance(temperature, Tensor):
            temperature = change(temperature.expand(*self.hidden.shape[:-1], 1))
        return replace(self, hidden=change(self.hidden), temperature=temperature)

    def is_of_rows(self, dim: Any, more: int = 0) -> bool:
        """Return whether ``dim`` is a dimension but the last, the vocabulary's."""
        end = len(self.shape) + more
        return isinstance(dim, int) and -end <= dim < end and dim % end != end - 1


def _index(x: Recipe, index: Any) -> Any:
    entries = list(index) if isinstance(index, tuple) else [index]
    used = 0
    for entry in entries:
        mask = isinstance(entry, Tensor) and entry.dtype == torch.bool
        known = mask or entry is None or entry is Ellipsis or type(entry) in (int, slice)
        if not known and not (isinstance(entry, Tensor) and entry.dtype == torch.int64):
            return NotImplemented
        if entry is not None and entry is not Ellipsis:
            used += entry.dim() if mask else 1
    # the vocabulary stays whole
    from_the_end = any(entry is Ellipsis for entry in entries) and entries[-1] is not Ellipsis
    if (used == len(x.shape) or from_the_end) and entries[-1] != slice(None):
        return NotImplemented
    return x.rows(lambda rows: rows[index])


def _reshape(x: Recipe, *shape: Any) -> Any:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    if not sizes or not all(type(size) is int for size in sizes):
        return NotImplemented
    *rows, last = sizes
    # -1 is the vocabulary if the others are the rows
    if last != x.shape[-1] and (last != -1 or math.prod(rows) != math.prod(x.shape[:-1])):
        return NotImplemented
    return x.rows(lambda old: old.reshape(*rows, old.shape[-1]))


def _flatten(x: Recipe, start_dim: int = 0, end_dim: int = -1) -> Any:
    if not x.is_of_rows(end_dim) or start_dim == end_dim:
        return NotImplemented
    return x.rows(lambda rows: rows.flatten(start_dim, end_dim))


def _squeeze(x: Recipe, dim: Any) -> Any:
    return x.rows(lambda rows: rows.squeeze(dim)) if x.is_of_rows(dim) else NotImplemented


def _unsqueeze(x: Recipe, dim: int) -> Any:
    return x.rows(lambda rows: rows.unsqueeze(dim)) if x.is_of_rows(dim, 1) else NotImplemented


def _to(x: Recipe, *args: Any, **kwargs: Any) -> Any:
    if "copy" in kwargs or any(value is True for value in args):  # does not parse
        return NotImplemented
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if device not in (None, x.hidden.device) or memory_format is not None:
        return NotImplemented
    return _cast(x, dtype or x.dtype)


def _cast(x: Recipe, dtype: torch.dtype) -> Any:
    if dtype == x.dtype:
        return x
    return replace(x, dtype=dtype) if dtype in _CASTS else NotImplemented


def _contiguous(x: Recipe) -> Any:
    # without gradients it is the logits themselves, with theirs, or a copy that has none
    return replace(x) if torch.is_grad_enabled() or x.detached else NotImplemented


def _detach(x: Recipe) -> Recipe:
    return replace(x, hidden=x.hidden.detach(), detached=True)


def _scaled(x: Recipe, other: Any, *, inverted: bool) -> Any:
    """Divide by positive numbers, one or one per row, or by their inverses."""
    if isinstance(other, Tensor):
        known = other.is_floating_point() and other.dim() <= len(x.shape)
        known = known and (other.dim() == 0 or other.shape[-1] == 1)
        rows = x.shape[:-1]
        known = known and torch.broadcast_shapes(other.shape[:-1], rows) == rows
    else:
        known = isinstance(other, int | float)
    if not known or x.normalised:
        return NotImplemented
    dtype = torch.result_type(torch.empty(x.shape, dtype=x.dtype, device="meta"), other)
    # 16 bits have not the digits of an inverse
    factor = torch.as_tensor(other, dtype=torch.float64).detach()
    factor = 1 / factor if inverted else factor
    positive = bool(((factor > 0) & factor.isfinite()).all())
    if not positive or dtype not in (x.dtype, *_CASTS):
        return NotImplemented
    temperature = x.temperature * (float(factor) if factor.numel() == 1 else factor)
    return replace(x, temperature=temperature, dtype=dtype)


def _divide(x: Recipe, other: Any) -> Any:
    return _scaled(x, other, inverted=False)


def _multiply(x: Recipe, other: Any) -> Any:
    return _scaled(x, other, inverted=True)


def _tanh(x: Recipe) -> Any:
    if x.capped or x.normalised or isinstance(x.temperature, Tensor):
        return NotImplemented
    return replace(x, scale=x.scale / x.temperature, capped=True, temperature=1.0)


def _log_softmax(x: Recipe, dim: Any = None, dtype: Any = None, _stacklevel: int = 3) -> Any:
    last = dim in (-1, len(x.shape) - 1)
    if not last or x.normalised or dtype not in (None, x.dtype, *_CASTS):
        return NotImplemented
    return replace(x, normalised=True, dtype=dtype or x.dtype)


def _gather(x: Recipe, dim: int, index: Tensor) -> Any:
    alone = index.shape == (*x.shape[:-1], 1)
    if not alone or dim not in (-1, len(x.shape) - 1) or not x.normalised:
        return NotImplemented
    ids = index.where(index != IGNORE_INDEX, _NOT_AN_ID)
    return x.score(ids.squeeze(-1), "logprobs").unsqueeze(-1)


def _cross_entropy(
    x: Recipe,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    fits = len(x.shape) == 2 and not x.normalised and target.shape == x.shape[:1]
    if not plain or not fits or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    counts = target != ignore_index
    ids = target.where(target != IGNORE_INDEX, _NOT_AN_ID).where(counts, IGNORE_INDEX)
    each = -x.score(ids, "logprobs")
    if reduction == "none":
        return each
    return each.sum() / (counts.sum() if reduction == "mean" else 1)


# by the names of torch's functions and methods
# whose result may share memory, or is made of the same real logits
VIEWS: dict[str, Callable[..., Any]] = {
    "__getitem__": _index,
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
    "to": _to,
    "float": lambda x: _cast(x, torch.float32),
    "bfloat16": lambda x: _cast(x, torch.bfloat16),
    "half": lambda x: _cast(x, torch.float16),
    "contiguous": _contiguous,
    "clone": lambda x: replace(x),  # not of the log-softmax that its gradient needs
    "detach": _detach,
}
# whose result is made by its own recipe
COPIES: dict[str, Callable[..., Any]] = {
    "div": _divide,
    "__truediv__": _divide,
    "true_divide": _divide,
    "mul": _multiply,
    "__mul__": _multiply,
    "__rmul__": _multiply,
    "tanh": _tanh,
    "log_softmax": _log_softmax,
}
# in place
CHANGES: dict[str, Callable[..., Any]] = {
    "div_": _divide,
    "__itruediv__": _divide,
    "mul_": _multiply,
    "__imul__": _multiply,
}
SCORES: dict[str, Callable[..., Any]] = {"gather": _gather, "cross_entropy": _cross_entropy}
