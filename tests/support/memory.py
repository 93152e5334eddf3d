"""Whether a call keeps memory that autograd saved for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


@contextmanager
def offloaded(leaves: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield computed copies of ``leaves`` to a call whose saved tensors are offloaded.

    A gathered weight is such a copy. Afterwards nothing may hold its memory: autograd has saved
    another copy for the backward.
    """
    copies = {name: x.new_empty_strided(x.shape, x.stride()).copy_(x) for name, x in leaves.items()}
    memory = {name: StorageWeakRef(x.untyped_storage()) for name, x in copies.items()}
    with saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x):
        yield copies
    copies.clear()
    kept = [name for name, storage in memory.items() if not storage.expired()]
    assert not kept, f"memory kept from forward to backward: {', '.join(kept)}"
