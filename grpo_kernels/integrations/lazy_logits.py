"""LazyLogits: what a head returns to hosts whose own functions score its logits.

It knows the hidden states and what the logits would be divided by. Rows of it, casts and scales
are remembered; :meth:`LazyLogits.logprobs` and :meth:`LazyLogits.entropy` call the head with ids,
as a module, so that FSDP2 knows. Whatever else is done with it is done with real logits, which are
formed for that.
"""

from __future__ import annotations

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


@dataclass
class _Memory:
    """What logits and views of them share: how often they were changed in place."""

    changes: int = 0


@dataclass(eq=False)
class LazyLogits:
    """Logits (..., V) that are formed when somebody needs them as such. No tensor."""

    layer: Any  # a FusedHead
    hidden: Tensor  # (..., D)
    dtype: torch.dtype
    detached: bool  # no gradient is recorded
    temperature: float
    memory: _Memory
    changes: int  # of the memory, that these logits have
    real: Tensor | None = None

    requires_grad = False  # whoever asks would hook on to it

    @staticmethod
    def of(layer: nn.Module, hidden: Tensor) -> LazyLogits:
        """Return those of a layer, as its forward would."""
        detached = not torch.is_grad_enabled()
        return LazyLogits(layer, hidden, hidden.dtype, detached, 1.0, _Memory(), 0)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.layer.out_features))

    @property
    def ndim(self) -> int:
        return self.hidden.dim()

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

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

    def __getitem__(self, index: Any) -> Any:
        entries = index if isinstance(index, tuple) else (index,)
        rows = entries[:-1] if len(entries) == self.ndim else entries
        whole = len(entries) < self.ndim or entries[-1] == slice(None)
        # the vocabulary stays whole
        if self.real is not None or not whole or not all(type(x) in (int, slice) for x in rows):
            return self.formed()[index]
        return self._view(lambda hidden: hidden[rows])

    def squeeze(self, dim: int) -> Any:
        if self.real is not None or dim not in range(-self.ndim, self.ndim - 1) or dim == -1:
            return self.formed().squeeze(dim)
        return self._view(lambda hidden: hidden.squeeze(dim))

    def detach(self) -> LazyLogits:
        found = self._view(torch.Tensor.detach)
        found.detached, found.real = True, None if self.real is None else self.real.detach()
        return found

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = args[0] if len(args) == 1 and not kwargs else None
        if kwargs.keys() == {"dtype"} and not args:
            dtype = kwargs["dtype"]
        if self.real is not None or dtype not in _CASTS:
            return self.formed().to(*args, **kwargs)
        self._check()
        return self if dtype == self.dtype else self._made(dtype=dtype)

    def float(self) -> Any:
        return self.to(torch.float32)

    def __truediv__(self, other: Any) -> Any:
        if self.real is not None or not _is_positive(other):
            return self.formed() / other
        self._check()
        return self._made(temperature=self.temperature * other)

    def __mul__(self, other: Any) -> Any:
        if self.real is not None or not _is_positive(other):
            return self.formed() * other
        self._check()
        return self._made(temperature=self.temperature / other)

    def div_(self, other: Any) -> Any:
        """Divide in place; views that were made before are of no use any more."""
        if self.real is not None or not _is_positive(other):
            return self._to_be_changed().div_(other)
        self._check()
        self.memory.changes += 1
        self.temperature, self.changes = self.temperature * other, self.memory.changes
        return self

    __itruediv__ = div_

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"LazyLogits: no attribute {name!r}")
        return getattr(self._to_be_changed() if name.endswith("_") else self.formed(), name)

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give torch's functions real logits."""
        args, kwargs = tree_map(
            lambda x: x.formed() if isinstance(x, LazyLogits) else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def _view(self, change: Callable[[Tensor], Tensor]) -> LazyLogits:
        self._check()
        return replace(self, hidden=change(self.hidden))

    def _to_be_changed(self) -> Tensor:
        """Return real logits that will be changed in place; others do not see the change."""
        real = self.formed()
        self.memory.changes += 1
        self.changes = self.memory.changes
        return real

    def _made(self, **changes: Any) -> LazyLogits:
        """Return logits in memory of their own."""
        return replace(self, memory=_Memory(), changes=0, **changes)

    def _check(self) -> None:
        if self.changes != self.memory.changes:
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


def _of_formed(name: str) -> Callable[..., Any]:
    def operator(self: LazyLogits, *others: Any) -> Any:
        return getattr(self.formed(), name)(*others)

    return operator


for _name in ("add", "radd", "sub", "rsub", "rmul", "neg", "pow", "gt", "ge", "lt", "le"):
    setattr(LazyLogits, f"__{_name}__", _of_formed(f"__{_name}__"))
