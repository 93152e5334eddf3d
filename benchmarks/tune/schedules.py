"""Both schedules side by side over a grid of heads; the speeds that follow from them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from benchmarks.environment import environment
from benchmarks.problem import Problem, make_problem
from benchmarks.providers.ours import run_loss
from benchmarks.shapes import Case, Model
from benchmarks.timing import make_timer
from benchmarks.tune.fit import DTYPES, Sample, Verdict, fit, verdict
from benchmarks.tune.rates import RatesTable
from benchmarks.work import WORKS
from grpo_kernels.tools.estimate.cost import FITTED, SCHEDULES, class_of
from grpo_kernels.tools.estimate.speed import Speed

_ROUNDS = 4  # of which the first warms up
# T, D, V
_CPU_SHAPES = (
    (64, 896, 151936),
    (256, 896, 151936),
    (1024, 896, 151936),
    (512, 896, 151936),
    (128, 2048, 65536),
    (1024, 1024, 65536),
    (256, 2048, 32000),
    (1024, 512, 32000),
    (64, 1024, 32000),
    (512, 1024, 8192),
    (1024, 2048, 8192),
)
_CPU_TILES = ((1024, 1024, 32000), (512, 896, 65536))
_CPU_TILE_ROWS = (64, 128, 256)
_GPU_SHAPES = (
    *product((1024, 4096, 8192, 16384), (896, 2048, 4096), (151936,)),
    *product((1024, 8192), (2048, 4096), (32000, 262144)),
)
_GPU_TILES = ((8192, 2048, 151936), (4096, 896, 151936))
_GPU_TILE_ROWS = (256, 512, 1024, 2048)


def grid(device: str) -> list[Sample]:
    """What is measured, dtypes in turn, so that what is cut off at the end is a bit of each."""
    on_cpu = device == "cpu"
    found = []
    for tokens, hidden, columns in _CPU_SHAPES if on_cpu else _GPU_SHAPES:
        for dtype, frozen in product(DTYPES, (False, True)):
            shape = dict(tokens=tokens, hidden=hidden, vocabulary=columns, dtype=dtype)
            found += [
                _sample(device, frozen=frozen, precision=precision, **shape)
                for precision in ("fp32", "input")[: 1 + (dtype != "fp32")]
            ]
    tiles = product(*((_CPU_TILES, _CPU_TILE_ROWS) if on_cpu else (_GPU_TILES, _GPU_TILE_ROWS)))
    for (tokens, hidden, columns), rows in tiles:
        for dtype in DTYPES:
            shape = dict(tokens=tokens, hidden=hidden, vocabulary=columns, dtype=dtype)
            found.append(_sample(device, max_workspace_bytes=rows * columns * 4, **shape))
    return found


def _sample(device: str, **fields: Any) -> Sample:
    base: dict[str, Any] = dict(frozen=False, precision="fp32", max_workspace_bytes=None)
    return Sample(device=device, **{**base, **fields})


Timer = Callable[[Callable[[], Any]], float]


def measure(samples: Sequence[Sample], timer: Timer, end: float) -> Iterator[Sample]:
    """The samples with their times; none is begun after ``end``, by ``time.monotonic()``."""
    for sample in samples:
        if time.monotonic() > end:
            print("the time was up: the rest of the grid is left out")
            return
        measured = _measured(sample, timer)
        one, two = (measured.measured(name) * 1e3 for name in SCHEDULES)
        print(f"{sample}: one_pass {one:.3g} ms, two_pass {two:.3g} ms", flush=True)
        yield measured


def _measured(sample: Sample, timer: Timer) -> Sample:
    work = WORKS["dapo-frozen" if sample.frozen else "dapo"]
    model = Model("tuned", sample.hidden, sample.vocabulary)
    # with its true old log-probabilities: tokens far off would be clipped, and left out
    problem = make_problem(Case(model, sample.tokens, sample.dtype, work), sample.device)
    settings = dict(precision=sample.precision, max_workspace_bytes=sample.max_workspace_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in SCHEDULES}
    for index in range(_ROUNDS):
        # every other round backwards, so that none always follows the other
        for name in list(SCHEDULES)[:: 1 if index % 2 == 0 else -1]:
            elapsed = timer(_bound(problem, {**settings, "schedule": name}))
            if index:
                seconds[name].append(elapsed)
    return replace(sample, seconds=seconds)


def _bound(problem: Problem, settings: dict[str, Any]) -> Callable[[], Any]:
    return lambda: run_loss(problem, settings)


def facts(device: str) -> dict[str, Any]:
    """Where the samples come from."""
    return {
        "device_class": class_of(torch.device(device)),
        "environment": environment(device),
    }


def run(device: str, end: float) -> Iterator[dict[str, Any]]:
    """The samples as plain data."""
    gc.collect()
    gc.freeze()  # the timer collects before each sample: of what is new since then
    yield from map(asdict, measure(grid(device), make_timer(device), end))


def fitted(table: RatesTable, data: dict[str, Any]) -> tuple[RatesTable, Verdict]:
    """``table`` with the speeds of one device, and how good they are on their own samples."""
    samples, known = [Sample(**entry) for entry in data["samples"]], data["environment"]
    rates = {}
    for dtype in DTYPES:
        if of_dtype := [x for x in samples if x.dtype == dtype]:
            rates[dtype] = fit(of_dtype)
    new = table.with_device(
        data["device_class"],
        {
            "device": known["device"],
            "date": known["date"][:10],
            "commit": known["commit"][:12],
            "threads": str(known["threads"]),
            "torch": str(known["versions"]["torch"]),
        },
        rates,
    )
    return new, verdict(samples, {dtype: _speed(row) for dtype, row in rates.items()})


def _speed(row: tuple[float, ...]) -> Speed:
    rates = dict(zip(FITTED, row, strict=True))
    return Speed(**rates, wide_matrix=rates["matrix"], where="here", source="these samples")
