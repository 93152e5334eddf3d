"""Whether a call keeps memory that autograd saved for it, and how much it takes at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


@contextmanager
def freed(leaves: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield computed copies of ``leaves``, as a gathered weight is one; afterwards nothing may hold
    their memory."""
    copies = {name: x.new_empty_strided(x.shape, x.stride()).copy_(x) for name, x in leaves.items()}
    memory = {name: StorageWeakRef(x.untyped_storage()) for name, x in copies.items()}
    yield copies
    copies.clear()
    kept = [name for name, storage in memory.items() if not storage.expired()]
    assert not kept, f"memory kept from forward to backward: {', '.join(kept)}"


def offloaded(call: Callable[[dict[str, Tensor]], T], leaves: dict[str, Tensor]) -> T:
    """Return a call of computed tensors; autograd saves another copy of them for the backward."""
    hooks = saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
    with hooks, freed(leaves) as copies:
        return call(copies)


def checkpointed(call: Callable[[dict[str, Tensor]], T], leaves: dict[str, Tensor]) -> T:
    """Return a call of computed tensors; the backward computes them, and the call, again."""
    calls = itertools.count()

    def function(*values: Tensor) -> T:
        named = dict(zip(leaves, values, strict=True))
        with freed(named) if next(calls) == 0 else nullcontext(named) as copies:
            return call(copies)

    return checkpoint(function, *leaves.values(), use_reentrant=False)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an op makes, views and in-place results aside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in _with_values((args, kwargs or {}))}
        for x in _with_values(out):
            if x.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, x.numel())
        return out


def _with_values(tree: Any) -> list[Tensor]:
    """Return the tensors that are no traced ones."""
    return [x for x in tree_leaves(tree) if type(x) in (Tensor, nn.Parameter)]
