"""Seconds of one call: wall time on a CPU, device events on a GPU whose L2 cache was flushed."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

_FLUSH_BYTES = 256 << 20  # more than any L2


def make_timer(device: str) -> Callable[[Callable[[], Any]], float]:
    """Return a timer: call -> seconds, without the time to free the call's result."""
    return _DeviceTimer() if device == "cuda" else _wall_seconds


@contextlib.contextmanager
def quick_collections() -> Iterator[None]:
    """Keep garbage collection from walking through everything that is loaded by now."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _wall_seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


class _DeviceTimer:
    def __init__(self) -> None:
        self._flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def __call__(self, call: Callable[[], Any]) -> float:
        gc.collect()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        # the device flushes while the host already launches: the first launch is not waited for
        self._flushed.zero_()
        start.record()
        result = call()
        stop.record()
        torch.cuda.synchronize()
        del result
        return start.elapsed_time(stop) / 1000
