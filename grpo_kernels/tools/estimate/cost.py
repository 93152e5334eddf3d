"""What both schedules are predicted to take, and which of them is the faster that fits."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch
from torch import Tensor

from grpo_kernels.backends.configs.rows import device_class
from grpo_kernels.backends.cpu import rows as cpu
from grpo_kernels.engine.route import Path
from grpo_kernels.head.head import Head
from grpo_kernels.tools.estimate import our_work
from grpo_kernels.tools.estimate.cost_rates import MEASURED_ON, RATES
from grpo_kernels.tools.estimate.memory import MemoryPrediction, predict_schedule_memory
from grpo_kernels.tools.estimate.shape import DTYPES, HeadShape, Setting
from grpo_kernels.tools.estimate.speed import Gpu, Speed, datasheet, find_gpu
from grpo_kernels.tools.text import duration

# Guesses, for devices of which nothing is known: the least that is bought for this work today.
_SOME_GPU = Gpu(name="some GPU", pattern="", tflops=250, tflops_fp32=40, bandwidth=1500)
_CPU_THREAD = Speed(
    matrix=5e10, wide_matrix=5e10, bandwidth=5e9, adding=3e9, piece=1e-3, call=3e-3,
    where="this CPU", source="",
)  # fmt: skip
SCHEDULES = {"one_pass": our_work.one_pass, "two_pass": our_work.two_pass}
FITTED = ("matrix", "sums", "fused", "bandwidth", "adding", "piece", "call")
_TIE, _LESS = 1.03, 0.75  # times that the model cannot tell apart; memory that is worth a tie
_OF_A_THREAD = ("matrix", "wide_matrix", "sums", "fused", "bandwidth", "adding")


@dataclass(frozen=True)
class Cost:
    """Of one schedule."""

    seconds: float
    memory: MemoryPrediction

    def __str__(self) -> str:
        return f"{duration(self.seconds)}, {_mib(self.memory.extra)}"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Of both, on a device."""

    one_pass: Cost
    two_pass: Cost
    source: str  # of the coefficients

    @property
    def faster(self) -> str:
        return "two_pass" if self.two_pass.seconds < self.one_pass.seconds else "one_pass"

    @property
    def _tied(self) -> bool:
        """Whether two_pass takes no more time, as far as is known, and far less memory."""
        one, two = self.one_pass, self.two_pass
        near = one.seconds <= two.seconds < _TIE * one.seconds
        return near and two.memory.extra < _LESS * one.memory.extra

    def choose(self, free: int | None) -> tuple[str, str]:
        """The schedule and the reason for it; ``free`` bytes matter only where one does not fit."""
        if self._tied:
            return "two_pass", "two_pass: predicted to be as fast, in less memory"
        other = {"one_pass": "two_pass", "two_pass": "one_pass"}[self.faster]
        first, second = getattr(self, self.faster), getattr(self, other)
        if free is None or first.memory.growth <= free:
            return self.faster, f"{self.faster}: predicted to be the faster"
        smaller = other if second.memory.growth < first.memory.growth else self.faster
        needs = f"{self.faster} needs {_mib(first.memory.growth)}, {_mib(free)} are free"
        if second.memory.growth > free:
            needs += ", and neither fits"
        return smaller, f"{smaller}: {needs}"

    def __str__(self) -> str:
        return (
            f"one_pass {self.one_pass}; two_pass {self.two_pass} beyond inputs and gradients "
            f"({self.source})"
        )


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What a call does with its rows."""

    active: int  # with a gradient
    chunks: int  # of one_pass
    forward_only: int
    sampling_mask: bool  # they have sampling masks


def costs_of(hidden: Tensor, head: Head, path: Path, rows: Rows) -> Costs | None:
    """Of a call whose hidden states are like ``hidden``; None where there are no formulas."""
    weight, backend = head.weight, path.choice.backend.name
    known = hidden.dtype in DTYPES and weight.dtype in (hidden.dtype, torch.float32)
    if not (known and rows.active and weight.numel()):
        return None
    shape = HeadShape(
        hidden=weight.shape[1],
        vocabulary=weight.shape[0],
        dtype=hidden.dtype,
        weight_dtype=weight.dtype,
        frozen=not weight.requires_grad,
        softcap=head.transform.softcap is not None,
    )
    setting = Setting(
        tokens=rows.active,
        # in its interpreter, too, Triton's kernels allocate what they do on a GPU
        device="cuda" if hidden.is_cuda or backend == "triton" else "cpu",
        threads=torch.get_num_threads(),
        tile_rows=path.tile_rows,
        num_chunks=rows.chunks,
        forward_only=rows.forward_only,
        sampling_mask=rows.sampling_mask,
        tiled=path.linear_stats is None,
        native=backend == "cpu",
    )
    speed = speed_of(hidden.device, hidden.dtype)
    return predict_costs(shape, setting, path.precision, speed)


@functools.lru_cache(maxsize=1024)
def predict_costs(head: HeadShape, setting: Setting, precision: str, speed: Speed) -> Costs:
    """Time and memory of both schedules."""
    costs = {
        name: Cost(
            work(head, setting, precision).seconds(speed),
            predict_schedule_memory(name, head, setting, precision),
        )
        for name, work in SCHEDULES.items()
    }
    return Costs(**costs, source=speed.source)


def speed_of(device: torch.device, dtype: torch.dtype) -> Speed:
    """The fitted rates of a device like this one, else a guess."""
    gpu = None
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""
    return fitted_speed(device, dtype) or _guess(gpu, dtype, torch.get_num_threads())


def class_of(device: torch.device) -> str:
    """What one fit is good for: "sm_90", or "cpu amx" by the instructions of the kernels."""
    if device.type == "cuda":
        return device_class(device)
    return f"cpu {cpu.isa()}" if cpu.unavailable() is None else "cpu"


def fitted_speed(device: torch.device, dtype: torch.dtype) -> Speed | None:
    """The rows of the table, those of bf16 for fp16; None where there are none."""
    threads = None if device.type == "cuda" else torch.get_num_threads()
    return speed_of_class(class_of(device), dtype, threads)


def speed_of_class(kind: str, dtype: torch.dtype, threads: int | None) -> Speed | None:
    """The same of devices by the name of their class, a CPU's for so many threads."""
    name = "fp32" if dtype == torch.float32 else "bf16"
    row, wide = RATES.get((kind, name)), RATES.get((kind, "fp32"))
    if row is None or wide is None:
        return None
    facts = MEASURED_ON[kind]
    speed = Speed(
        **dict(zip(FITTED, row, strict=True)),
        wide_matrix=wide[FITTED.index("matrix")],
        where=facts["device"],
        source=f"fitted on {facts['device']}",
    )
    return speed if threads is None else _of_threads(speed, threads / int(facts["threads"]))


@functools.lru_cache(maxsize=64)
def _guess(gpu: str | None, dtype: torch.dtype, threads: int) -> Speed:
    """Of a GPU by its name, else of a CPU."""
    if gpu is not None:
        guess = datasheet(find_gpu(gpu) or _SOME_GPU, dtype)
        return replace(guess, source=f"a guess for this device: {guess.source}")
    guess = _of_threads(_CPU_THREAD, threads)
    return replace(guess, source="a guess for this device: nothing was fitted on one like it")


def _of_threads(speed: Speed, factor: float) -> Speed:
    rates: dict[str, Any] = {name: speed.rate(name) * factor for name in _OF_A_THREAD}
    return replace(speed, **rates)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated, without a sync; None where it cannot be asked."""
    if torch.compiler.is_compiling():
        return None
    if device.type == "cpu":
        return psutil.virtual_memory().available
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
