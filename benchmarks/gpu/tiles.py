"""The row kernels and the forward without gradient, at the tiles that are worth a look."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu import linear_tiles, row_tiles
from benchmarks.gpu.candidates import Candidate
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.timed import TRAFFIC, Cost, Stopwatch, rates
from benchmarks.shapes import Model
from grpo_kernels.backends.configs.rows import ROW_KERNELS

_COLUMNS = 151936
_DEFAULT = (4, 4)
_WARPS_AND_DEPTHS = (_DEFAULT, (8, 2), (16, 2), (16, 4))
_ROUNDS = 7
# bytes that a kernel reads of a logit and writes; the loss reads it once where its result is bf16
_WRITES = {"stats": 0, "dlogits": 2, "loss": 2}
# the hidden sizes of the forward
_MODELS = [Model(f"D {depth}", depth, _COLUMNS) for depth in (2048, 4096, 896)]
_TOKENS = 8192


def rows(notes: Notes, small: bool) -> None:
    """Measure the row kernels over tiles of fp32 and bf16 logits."""
    count, columns = (1, 53) if small else (4096, _COLUMNS)
    values = _WARPS_AND_DEPTHS[: 2 if small else None]
    watch = Stopwatch(notes.device, 1 if small else _ROUNDS)
    notes.every(
        (
            f"{kernel} {dtype}",
            partial(_row_kernel, notes, watch, kernel, dtype, count, columns, values),
        )
        for dtype in (torch.float32, torch.bfloat16)
        for kernel in reversed(ROW_KERNELS)
    )


def _row_kernel(
    notes: Notes,
    watch: Stopwatch,
    kernel: str,
    dtype: torch.dtype,
    count: int,
    columns: int,
    values: tuple[tuple[int, int], ...],
) -> None:
    every = row_tiles.candidates(kernel, dtype, count, columns, notes.device)
    chosen = {x.value: x for x in every if x.value in values}
    cost = Cost(bytes=float(count * columns * (dtype.itemsize + _WRITES[kernel])))
    times: dict[tuple[int, ...], float] = {}
    name = f"{kernel} of {str(dtype).removeprefix('torch.')}"
    notes.every(
        (f"{name} {value}", partial(_candidate, notes, watch, name, chosen[value], cost, times))
        for value in values
    )
    _best(notes, name, times, _DEFAULT, lambda seconds: f"{cost.bytes / seconds / TRAFFIC:.0%}")


def forward(notes: Notes, small: bool) -> None:
    """Measure the fused forward, at the default and at every tile, and the library's GEMM."""
    models = [Model("tiny", 32, 257)] if small else _MODELS
    count = 8 if small else _TOKENS
    watch = Stopwatch(notes.device, 1 if small else 5)
    every = {
        model: linear_tiles.candidates(model, count, "fp32", notes.device, torch.bfloat16)
        for model in models
    }
    times: dict[Model, dict[tuple[int, ...], float]] = {model: {} for model in models}
    values = [candidate.value for candidate in every[models[0]]]
    default, *rest = values
    order = [default, linear_tiles.TILES_OF_LOGITS, *(x for x in rest if x)]
    by_value = {model: {x.value: x for x in every[model]} for model in models}
    notes.every(
        (
            f"forward {value}, {model.name}",
            partial(
                _candidate, notes, watch, f"forward {model.name}", by_value[model][value],
                Cost(operations=2.0 * count * model.vocabulary * model.hidden), times[model],
            ),
        )
        for value in (order[:3] if small else order)
        for model in models
    )  # fmt: skip
    for model in models:
        floor = Cost(operations=2.0 * count * model.vocabulary * model.hidden).floor
        _best(notes, f"forward {model.name}", times[model], default, partial(_over, floor))


def _candidate(
    notes: Notes,
    watch: Stopwatch,
    name: str,
    candidate: Candidate,
    cost: Cost,
    times: dict[tuple[int, ...], float],
) -> None:
    """Check a candidate against the default, then time it."""
    candidate.prepare()
    failure = candidate.check()
    if notes.check(
        f"{name} {candidate.value}", failure is None, "the default's", failure or "that"
    ):
        seconds = watch.seconds(candidate.run, candidate.prepare)
        times[candidate.value] = seconds
        notes.number(f"{name} {candidate.value}", **rates(seconds, cost))


def _over(floor: float, seconds: float) -> str:
    return f"x{seconds / floor:.2f}"


def _best(
    notes: Notes,
    name: str,
    times: dict[tuple[int, ...], float],
    default: tuple[int, ...],
    rated: Callable[[float], str],
) -> None:
    """Say what was fastest, and how near the floor that is."""
    if not times:
        return
    best = min(times, key=lambda value: times[value])
    words: dict[tuple[int, ...], list[str]] = {}
    for word, value in (("default", default), ("best", best), ("library", ())):
        if value in times:
            words.setdefault(value, []).append(word)
    said = [
        f"{' and '.join(named)} {'x'.join(map(str, value))} "
        f"{times[value] * 1e3:.2f} ms ({rated(times[value])})"
        for value, named in words.items()
    ]
    notes.headline(f"{name}: {', '.join(said)}")
