"""Ten thousand calls, some of which fail, leave neither memory nor Python objects behind."""

from __future__ import annotations

import ctypes
import gc
import mmap
import sys
from typing import NamedTuple

import pytest
import torch

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.backends.base import Entries
from grpo_kernels.testing import make_config, make_problem, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts of memory"),
    pytest.mark.skipif("cpu" not in available_backends(), reason="no native kernels"),
]

_WARM_UP = 250  # calls, until the allocators have what they keep
_OBJECTS = 10  # in all: a call that leaves one leaves a thousand
_RESIDENT = 8 << 20  # in all: allocators breathe
_BYTES = 32  # of a call: less than any tensor or workspace


class _Memory(NamedTuple):
    """What the process holds."""

    objects: int  # that the garbage collector knows: all tensors are among them
    blocks: int  # of Python's allocator
    malloced: int  # bytes, those of tensors and workspaces among them
    resident: int  # bytes

    @classmethod
    def now(cls) -> _Memory:
        gc.collect()
        heap = _mallinfo()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * mmap.PAGESIZE
        return cls(
            len(gc.get_objects()), sys.getallocatedblocks(), heap.uordblks + heap.hblkhd, resident
        )


class _Heap(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Heap

_PROBLEM = make_problem(dtype=torch.float32)


def _loss() -> None:
    run(_PROBLEM, make_config("grpo"), backend="cpu")


def _logprobs() -> None:
    problem = _PROBLEM
    found = linear_logprobs(problem.hidden, problem.weight, problem.target, backend="cpu")
    torch.autograd.grad(found.logprobs.sum(), (problem.hidden, problem.weight))


def _bad_input() -> None:
    with pytest.raises(ValueError, match="target"):
        linear_logprobs(_PROBLEM.hidden, _PROBLEM.weight, _PROBLEM.target + 53, backend="cpu")


_ENTRIES = Entries(
    torch.zeros(2, 3, dtype=torch.int32),
    torch.zeros(2, 3),
    torch.ones(2, dtype=torch.int32),
    *torch.zeros(4, 2),
)


def _out_of_memory() -> None:
    from grpo_kernels.backends import BACKENDS

    endless = torch.empty(1 << 50, 0)  # where its rows' entries begin is more than addresses reach
    with pytest.raises(torch.OutOfMemoryError):
        BACKENDS["cpu"].entries_transposed_matmul(
            _ENTRIES, torch.ones(2), torch.empty(2, 0), endless, add=False, count=2
        )


@pytest.mark.parametrize(
    ("call", "calls"),
    [(_loss, 1000), (_logprobs, 1000), (_bad_input, 4000), (_out_of_memory, 4000)],
)
def test_leaves_nothing_behind(call, calls) -> None:
    for _ in range(_WARM_UP):
        call()
    before = _Memory.now()
    for _ in range(calls):
        call()
    after = _Memory.now()
    assert after.objects - before.objects < _OBJECTS
    assert after.blocks - before.blocks < calls
    assert after.malloced - before.malloced < _BYTES * calls
    assert after.resident - before.resident < _RESIDENT
