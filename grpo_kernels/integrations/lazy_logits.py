"""LazyLogits: what a head returns to hosts whose own functions score its logits.

It knows the hidden states and what the logits would be divided by. Rows of it, casts and scales
are remembered; :meth:`LazyLogits.logprobs` and :meth:`LazyLogits.entropy` call the head with ids,
as a module, so that FSDP2 knows. Whatever else is done with it is done with real logits, which are
formed for that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.head import Head
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs

_CASTS = (torch.float32, torch.bfloat16, torch.float16)
_DESCRIBING = ("shape", "size", "ndim", "dim", "numel", "device")  # known without real logits


@dataclass
class _Memory:
    """What logits and views of them share."""

    changed: bool = False  # in place: they are of no use any more


def _or_formed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Do it with real logits where a method returns NotImplemented, and once these are formed."""

    @functools.wraps(method)
    def run(self: LazyLogits, *args: Any, **kwargs: Any) -> Any:
        if self.real is None:
            self._check()
            found = method(self, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._of_formed(method.__name__)(*args, **kwargs)

    return run


@dataclass(eq=False)
class LazyLogits:
    """Logits (..., V) that are formed when somebody needs them as such. No tensor."""

    layer: Any  # a FusedHead
    hidden: Tensor  # (..., D)
    dtype: torch.dtype
    detached: bool  # no gradient is recorded
    temperature: float
    memory: _Memory
    real: Tensor | None = None

    requires_grad = False  # whoever asks would hook on to it

    @staticmethod
    def of(layer: nn.Module, hidden: Tensor) -> LazyLogits:
        """Return those of a layer, as its forward would."""
        return LazyLogits(layer, hidden, hidden.dtype, not torch.is_grad_enabled(), 1.0, _Memory())

    def logprobs(self, ids: Tensor) -> Tensor:
        """Return log p of ``ids`` (...), fp32, -100 giving 0; differentiable."""
        return self._scored(ids, "logprobs")

    def entropy(self) -> Tensor:
        """Return the entropy (...) in nats, fp32, differentiable."""
        ids = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)
        return self._scored(ids, "entropy")

    def formed(self) -> Tensor:
        """Return real logits; from then on these stand for such."""
        self._check()
        if self.real is None:
            with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
                logits = nn.Module.__call__(self.layer, self.hidden).to(self.dtype)
                self.real = logits if self.temperature == 1 else logits / self.temperature
        return self.real

    @_or_formed
    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        rows = entries[:-1] if len(entries) == self.ndim else entries
        whole = len(entries) < self.ndim or entries[-1] == slice(None)
        if not whole or not all(type(x) in (int, slice) for x in rows):
            return NotImplemented  # the vocabulary stays whole
        return replace(self, hidden=self.hidden[rows])

    @_or_formed
    def squeeze(self, dim: int) -> Any:
        if dim not in range(-self.ndim, self.ndim - 1) or dim == -1:
            return NotImplemented
        return replace(self, hidden=self.hidden.squeeze(dim))

    @_or_formed
    def detach(self) -> Any:
        return replace(self, hidden=self.hidden.detach(), detached=True)

    @_or_formed
    def to(self, dtype: Any = None, *more: Any, **options: Any) -> Any:
        if dtype not in _CASTS or more or options:
            return NotImplemented
        return self if dtype == self.dtype else replace(self, dtype=dtype, memory=_Memory())

    def float(self) -> Any:
        return self.to(torch.float32)

    @_or_formed
    def __truediv__(self, other: Any) -> Any:
        if not _is_positive(other):
            return NotImplemented
        return replace(self, temperature=self.temperature * other, memory=_Memory())

    @_or_formed
    def __mul__(self, other: Any) -> Any:
        if not _is_positive(other):
            return NotImplemented
        return replace(self, temperature=self.temperature / other, memory=_Memory())

    @_or_formed
    def div_(self, other: Any) -> Any:
        """Divide in place; views that were made before are of no use any more."""
        if not _is_positive(other):
            return NotImplemented
        self._leave_views()
        self.temperature *= other
        return self

    __itruediv__ = div_

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIBING:
            shape = (*self.hidden.shape[:-1], self.layer.out_features)
            return getattr(self.hidden[..., :1].expand(shape), name)
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"LazyLogits: no attribute {name!r}")
        return self._of_formed(name)

    def __len__(self) -> int:
        return len(self.hidden)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give torch's functions real logits."""
        args, kwargs = tree_map(
            lambda x: x.formed() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _of_formed(self, name: str) -> Any:
        """Return an attribute of real logits, which a method ``name_`` will change in place."""
        real = self.formed()
        if name.endswith("_") and not name.startswith("__"):
            self._leave_views()
        return getattr(real, name)

    def _leave_views(self) -> None:
        """Be changed in place: others that share the memory do not see the change."""
        self.memory.changed = True
        self.memory = _Memory()

    def _check(self) -> None:
        if self.memory.changed:
            raise RuntimeError(
                "LazyLogits: expected logits that nobody has changed since, got some that share "
                "memory with others which were changed in place; call formed() on these first"
            )
        if not isinstance(self.layer, FusedHead):
            raise RuntimeError(
                "LazyLogits: expected a head that returns them still, got one after disable()"
            )

    def _scored(self, ids: Tensor, output: str) -> Tensor:
        """Call the head with ids (...) for an output of ``linear_logprobs``."""
        self._check()

        def fn(hidden: Tensor, head: Head) -> LinearLogprobs:
            if head.weight.shape[0] != self.shape[-1]:
                raise ValueError(
                    f"model: expected a head that uses all {self.shape[-1]} columns of its logits, "
                    f"got vocab_size={head.weight.shape[0]}"
                )
            head = replace(head, transform=type(head.transform)())  # logits are without it
            temperature = self.temperature
            out = linear_logprobs(hidden, head, ids, temperature=temperature, outputs=(output,))
            return LinearLogprobs(*(None if x is None else x.clone() for x in out))

        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.detached):
            found: Tensor = getattr(self.layer(self.hidden, fn), output)
            return found


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *others: self._of_formed(name)(*others)


for _name in ("add", "radd", "sub", "rsub", "rmul", "neg", "pow", "gt", "ge", "lt", "le"):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))
