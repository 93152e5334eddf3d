"""Calls in a profiler's trace: the time to the first GEMM, launches, and idle gaps."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

CALL = "the call"
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|wgmma|linear_stats|anchored", re.IGNORECASE)
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_GAP_US = 5.0  # shorter gaps are between any two launches
Event = dict[str, Any]


class Timeline(NamedTuple):
    """One call on the device; times in seconds from its start on the CPU."""

    first_gemm: float
    end: float
    idle: float  # between the first GEMM and the end
    launches: int
    before_gemm: int  # launches
    gaps: list[tuple[float, str, str]]  # seconds, after which kernel and before which


def traced(
    call: Callable[[], Any], rounds: int, device: str, before: Callable[[], Any] = lambda: None
) -> list[Timeline]:
    """Profile calls from an idle device; ``before`` runs ahead of each and is not in it."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device == "cuda")]
    with profile(activities=activities) as profiled:
        for _ in range(rounds):
            before()
            _wait(device)
            with record_function(CALL):
                result = call()
            _wait(device)
            del result
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        return timelines(json.loads(path.read_text())["traceEvents"])


def timelines(events: Sequence[Event]) -> list[Timeline]:
    """Read the calls of a trace; one without a GEMM on the device is left out."""
    spans = [x for x in events if x.get("name") == CALL and x.get("cat") == "user_annotation"]
    starts = sorted(span["ts"] for span in spans)
    device = sorted((x for x in events if x.get("cat") in _ON_DEVICE), key=lambda x: x["ts"])
    ends = [*starts[1:], float("inf")]
    calls = []
    for start, end in zip(starts, ends, strict=False):
        inside = [x for x in device if start <= x["ts"] < end]
        first = next((i for i, x in enumerate(inside) if _GEMM.search(x["name"])), None)
        if first is not None:
            calls.append(_timeline(start, inside, first))
    return calls


def _timeline(start: float, events: Sequence[Event], first: int) -> Timeline:
    gaps: list[tuple[float, str, str]] = []
    last, busy = events[first]["name"], events[first]["ts"] + events[first]["dur"]
    for event in events[first + 1 :]:
        if event["ts"] - busy > _GAP_US:
            gaps.append((1e-6 * (event["ts"] - busy), last, event["name"]))
        if event["ts"] + event["dur"] > busy:
            last, busy = event["name"], event["ts"] + event["dur"]
    return Timeline(
        first_gemm=1e-6 * (events[first]["ts"] - start),
        end=1e-6 * (busy - start),
        idle=sum(gap[0] for gap in gaps),
        launches=len(events),
        before_gemm=first,
        gaps=sorted(gaps, reverse=True),
    )


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
