"""Peak memory of one call: the CUDA allocator's, or a fresh process's resident memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.problem import Problem, Result
from benchmarks.results import Memory


def measure_memory(run: Callable[[Problem], Result], problem: Problem) -> tuple[Memory, Result]:
    """Measure one call. On a CPU this needs a fresh process: an old one has memory to reuse."""
    peak = _cuda_growth if problem.hidden.device.type == "cuda" else _resident_growth
    result, growth = peak(run, problem)
    return Memory(growth - result.nbytes, result.nbytes), result


def _cuda_growth(run: Callable[[Problem], Result], problem: Problem) -> tuple[Result, int]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run(problem)
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def _resident_growth(run: Callable[[Problem], Result], problem: Problem) -> tuple[Result, int]:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    result = run(problem)
    return result, _status("VmHWM") - before


def _status(field: str) -> int:
    """Return a memory field of this process in bytes. (``ru_maxrss`` includes the parent's.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")
