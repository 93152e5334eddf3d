"""Where a step's time goes: its kernels, the GPU's idle time, and what the host does before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.notes import Notes
from benchmarks.gpu.waiting import step_of
from benchmarks.problem import make_problem
from benchmarks.shapes import MODELS, Case
from benchmarks.work import WORKS
from grpo_kernels import explain

_TOKENS = {False: (8192, 1024), True: (64,)}
_HOST_CALLS = 20
_SHOWN = 25  # kernels of the table


@dataclass(frozen=True)
class Span:
    """One kernel or copy on the device, in microseconds of the profile."""

    name: str
    start: float
    end: float


def profiles(notes: Notes, small: bool) -> None:
    """Profile one step of the dapo loss for each number of tokens."""
    model = MODELS["tiny" if small else "qwen3-1.7b"]
    cases = [Case(model, tokens, "bf16", WORKS["dapo"]) for tokens in _TOKENS[small]]
    notes.every((str(case), partial(_case, notes, case)) for case in cases)


def _case(notes: Notes, case: Case) -> None:
    problem, name = make_problem(case, notes.device.type), f"T {case.tokens} D {case.model.hidden}"
    step = step_of(problem, "auto")
    for _ in range(3):
        step()
    batch = problem.batch()
    arguments = problem.hidden, problem.weight, batch, problem.loss
    host = {
        "TokenBatch": _host_ms(problem.batch),
        "planning": _host_ms(lambda: explain(*arguments)),
        "the whole step": _host_ms(step),
    }
    notes.number(f"host, {name}", **{f"{key}, ms": value for key, value in host.items()})
    spans = device_spans(profiled(step))
    notes.number(f"spans, {name}", spans=[[x.name[:60], x.start, x.end - x.start] for x in spans])
    table(notes, name, spans)
    notes.headline(
        f"{name}: {len(spans)} kernels and copies, {busy(spans) / 1e3:.2f} ms busy, "
        f"{idle(spans) / 1e3:.2f} ms idle between them; host: "
        + ", ".join(f"{key} {value:.2f} ms" for key, value in host.items())
    )


def _host_ms(call: Callable[[], object]) -> float:
    """Return the median milliseconds until ``call`` returns; the device is idle before."""
    found = []
    for _ in range(_HOST_CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return median(found) * 1e3


def profiled(step: Callable[[], object]) -> Iterable[Any]:
    """Return the events of one step, after one that starts the profiler."""
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize()
    return found.events() or ()


def device_spans(events: Iterable[Any]) -> list[Span]:
    """Return what ran on the device, in the order of its start."""
    spans = [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(spans, key=lambda span: span.start)


def busy(spans: Sequence[Span]) -> float:
    """Return for how long anything runs."""
    total, end = 0.0, float("-inf")
    for span in spans:
        total += max(0.0, span.end - max(end, span.start))
        end = max(end, span.end)
    return total


def idle(spans: Sequence[Span]) -> float:
    """Return for how long nothing runs between the first and the last."""
    if not spans:
        return 0.0
    return max(span.end for span in spans) - spans[0].start - busy(spans)


def table(notes: Notes, name: str, spans: Sequence[Span]) -> None:
    """Note the kernels by the time that they take together."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.name, []).append(span.end - span.start)
    for kernel, each in sorted(times.items(), key=lambda item: -sum(item[1]))[:_SHOWN]:
        notes.number(f"{name}, {kernel[:100]}", us=sum(each), calls=len(each))
