"""Counts how often a step moves values between tensors and the host: each would wait for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import grpo_kernels.batch.host as host
from grpo_kernels.engine.compiled_logprobs import linear_logprobs_backward, linear_logprobs_forward

# no operations on a CPU; the last two would send values to a GPU
_FUNCTIONS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, torch.tensor, torch.as_tensor)
# results whose size depends on values; item() and bool() are the first
_SIZED_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2")
# torch hides what an op of ours does; these are the functions behind them
OURS = {op._opoverload: op._init_fn for op in (linear_logprobs_forward, linear_logprobs_backward)}


class _Functions(TorchFunctionMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _FUNCTIONS:
            self._reads.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OURS:
            with _Functions(self._reads), self:
                return OURS[func](*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name in _SIZED_OPS or self._sized_by_values(name, args, kwargs):
            self._reads.append(name)
        return func(*args, **kwargs)

    def _sized_by_values(self, name: str, args: tuple, kwargs: dict) -> bool:
        if name == "copy_":  # a number set at an index: sent to a device, with a wait
            return args[0].dim() == args[1].dim() == 0
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name not in ("index", "index_put", "index_put_"):
            return False
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Count the reads by name, on CPU tensors that are treated as if they were a GPU's.

    What the package reads only where that is free asks ``host.reading_is_free``; here it is not.
    What the host knows is in tensors that stay on the CPU, which cost no wait.
    """
    reads: list[str] = []

    def uncounted(function: Callable) -> Callable:
        def run(*args: object) -> object:
            before = len(reads)
            result = function(*args)
            del reads[before:]
            return result

        return run

    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    for name in ("to_host", "values"):
        monkeypatch.setattr(host, name, uncounted(getattr(host, name)))
    with _Functions(reads), _Operations(reads):
        yield reads
    monkeypatch.undo()
