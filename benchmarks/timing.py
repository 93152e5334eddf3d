"""Time and memory of one call, and calls in turns.

Wall time on a CPU, device events on a GPU whose L2 cache was flushed; the peak of the CUDA
allocator, or of a fresh process's resident memory.
"""

from __future__ import annotations

import gc
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.problem import Problem, Result

_FEWEST_ROUNDS = 3
_FLUSH_BYTES = 256 << 20  # more than any L2
_QUEUED_SIZE, _QUEUED_GEMMS = 8192, 4  # some 6 ms of an H100
_Call = TypeVar("_Call")


def in_turns(calls: Sequence[_Call], rounds: int, budget: float = math.inf) -> Iterator[_Call]:
    """Yield each call once per round, every other round in reverse order.

    No call always follows the same one, and a change of the machine's load affects all of them.
    After ``budget`` seconds no further round starts, except the first three.
    """
    start = time.monotonic()
    for index in range(rounds):
        if index >= _FEWEST_ROUNDS and time.monotonic() - start > budget:
            return
        gc.collect()
        yield from calls if index % 2 == 0 else reversed(calls)


def make_timer(device: str, queued: bool = False) -> Callable[[Callable[[], Any]], float]:
    """Return a timer: call -> seconds, without the time to free the call's result.

    ``queued``: behind GEMMs that keep a GPU busy for longer than the CPU needs for a step.
    """
    if device != "cuda":
        return _wall_seconds
    flushed = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    return partial(_device_seconds, flushed, _queued_gemms() if queued else None)


def _queued_gemms() -> Callable[[], None]:
    shape = _QUEUED_SIZE, _QUEUED_SIZE
    factor, product = torch.empty(2, *shape, dtype=torch.bfloat16, device="cuda").normal_()

    def queue() -> None:
        for _ in range(_QUEUED_GEMMS):
            torch.mm(factor, factor, out=product)

    return queue


def _wall_seconds(call: Callable[[], Any]) -> float:
    gc.collect()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def _device_seconds(
    flushed: torch.Tensor, before: Callable[[], None] | None, call: Callable[[], Any]
) -> float:
    gc.collect()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    # the device flushes while the CPU already launches, so the first launch adds no wait
    flushed.zero_()
    if before is not None:
        before()
    start.record()
    result = call()
    stop.record()
    torch.cuda.synchronize()
    del result
    return start.elapsed_time(stop) / 1000


def measure_memory(
    run: Callable[[Problem], Result], problem: Problem
) -> tuple[dict[str, int], Result]:
    """Measure one call in bytes: its extra memory, and the size of its results.

    Extra memory is beyond inputs and results. On a CPU this needs a fresh process, because an old
    one has memory to reuse.
    """
    peak = cuda_growth if problem.hidden.device.type == "cuda" else resident_growth
    result, growth = peak(partial(run, problem))
    return {"extra_bytes": growth - result.nbytes, "returned_bytes": result.nbytes}, result


def cuda_growth(run: Callable[[], Result]) -> tuple[Result, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def resident_growth(run: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of a call, and by how many bytes this process grew until its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    result = run()
    return result, _status("VmHWM") - before


def _status(field: str) -> int:
    """Return a memory field of this process in bytes. (``ru_maxrss`` includes the parent's.)"""
    found = re.search(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
