"""Waits of the GPU in a step: for the CPU before the first GEMM, gaps, and synchronizations."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks import text, traces
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.problem import Problem, make_problem
from benchmarks.results import Row
from benchmarks.shapes import Case, make_case
from benchmarks.timing import make_timer
from grpo_kernels import TokenBatch, linear_policy_loss

_CALLS = 5
_KEPT_GAPS = 12
_HOST_BYTES = 256 << 20  # larger than a CPU's caches
NOTES = {
    "ours": "the batch counts its tokens on the device",
    "ours, cold": "the same after a garbage collection and other work on the CPU",
    "ours, lengths": "lengths are given, on-policy; the call must not wait",
    "ours, lengths, cold": "the same, cold",
}
_GPU = [make_case("dapo", "qwen3-1.7b", tokens, "bf16") for tokens in (8192, 1024)]
CASES = {"tiny": [make_case("dapo", "tiny", 32, "fp32")], "gpu": _GPU, "gpu-full": _GPU}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    problem, device = make_problem(case, session.device), session.device
    size = _HOST_BYTES if device == "cuda" else 1 << 10
    other = torch.zeros(size // 4)

    def cool() -> None:
        gc.collect()
        other.add_(1)

    for row in rows:
        name = row.provider
        call = _step(problem, with_lengths="lengths" in name)
        with attempt(row):
            for _ in range(3):
                call()
            if "lengths" in name:
                _without_waiting(call, device)
            before: Callable[[], Any] = cool if "cold" in name else gc.collect
            row.seconds = [_host_seconds(call, before, device) for _ in range(session.rounds(10))]
            _add_device(row, call, before, device)


def _step(problem: Problem, with_lengths: bool) -> Callable[[], Any]:
    lengths = tuple(problem.mask.sum(1).tolist()) if with_lengths else None

    def call() -> Any:
        batch = TokenBatch.from_padded(
            problem.target,
            problem.advantages,
            problem.mask,
            # off-policy, a large batch may skip rows in the backward, and waits for their number
            old_logprobs=None if with_lengths else problem.old_logprobs,
            lengths=lengths,
        )
        loss = linear_policy_loss(problem.hidden, problem.weight, batch, problem.loss).loss
        return torch.autograd.grad(loss, (problem.hidden, problem.weight))

    return call


def _without_waiting(call: Callable[[], Any], device: str) -> None:
    """Run a call in torch's mode that raises if the CPU waits for the GPU."""
    if device != "cuda":
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _host_seconds(call: Callable[[], Any], before: Callable[[], Any], device: str) -> float:
    """Return how long a call keeps the CPU, from an idle device."""
    before()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    if device == "cuda":
        torch.cuda.synchronize()
    del result
    return seconds


def _add_device(row: Row, call: Callable[[], Any], before: Callable[[], Any], device: str) -> None:
    """Add numbers from a trace, the allocator, and the device's clock."""
    allocations = _device_allocations(device)
    calls = traces.traced(call, _CALLS, device, before)
    row.info["device_allocations"] = _device_allocations(device) - allocations
    if device != "cuda":
        return
    assert calls, "no GEMM in the trace"
    for name in ("first_gemm", "end", "idle", "launches", "before_gemm"):
        row.info[name] = median(getattr(each, name) for each in calls)
    row.info["gaps"] = calls[-1].gaps[:_KEPT_GAPS]
    for name, queued in (("alone", False), ("queued", True)):
        timer = make_timer(device, queued)
        row.info[name] = median(timer(call) for _ in range(10))
    row.cells = {
        "first GEMM": text.duration(row.info["first_gemm"]),
        "idle": text.duration(row.info["idle"]),
        "launches": f"{row.info['launches']:.0f}",
        "before the GEMM": f"{row.info['before_gemm']:.0f}",
        "allocations": str(row.info["device_allocations"]),
        "from idle": text.duration(row.info["alone"]),
        "queued": text.duration(row.info["queued"]),
    }


def _device_allocations(device: str) -> int:
    return torch.cuda.memory_stats().get("num_device_alloc", 0) if device == "cuda" else 0


test_waits = check_row
