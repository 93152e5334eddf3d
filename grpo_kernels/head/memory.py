"""Large CPU allocations on huge pages."""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable

from torch import Tensor

# Above the largest threshold from which glibc maps an allocation on its own: the advice then ends
# with the tensor.
MIN_BYTES = 32 << 20


def on_huge_pages(tensor: Tensor) -> Tensor:
    """The same tensor, which is new; Linux is asked to back it by huge pages if it is large.

    The first write to each 4 KiB page of a new allocation is a page fault. For the hundreds of
    megabytes of a logits tile these cost a twentieth of the products.
    """
    madvise = _madvise()
    if madvise is None or tensor.device.type != "cpu" or tensor.nbytes < MIN_BYTES:
        return tensor
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # only advice: a refusal changes nothing
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The C function, None where there are no such pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
