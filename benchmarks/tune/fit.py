"""Speeds of the schedules from measured times: least squares, no speed below zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from grpo_kernels.tools.estimate.cost import FITTED, SCHEDULES
from grpo_kernels.tools.estimate.shape import HeadShape, Setting
from grpo_kernels.tools.estimate.speed import Speed
from grpo_kernels.tools.estimate.work import DURATIONS, RATES, Work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# No device is as fast: where a fit finds no time for a kind of work, it gets this rate.
_FASTEST = 1e17
_SWEEPS = 2000
_COUNTS = {**{v: k for k, v in RATES.items()}, **{v: k for k, v in DURATIONS.items()}}


@dataclass(kw_only=True)
class Sample:
    """One loss by both schedules."""

    tokens: int
    hidden: int
    vocabulary: int
    dtype: str  # a name of DTYPES
    frozen: bool
    precision: str
    max_workspace_bytes: int | None
    device: str  # "cpu" | "cuda"
    seconds: dict[str, list[float]] = field(default_factory=dict)  # by schedule

    def work(self, schedule: str) -> Work:
        head = HeadShape(
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            dtype=DTYPES[self.dtype],
            frozen=self.frozen,
        )
        setting = Setting(
            tokens=self.tokens, device=self.device, max_workspace_bytes=self.max_workspace_bytes
        )
        return SCHEDULES[schedule](head, setting, self.precision)

    def measured(self, schedule: str) -> float:
        return median(self.seconds[schedule])

    def loss(self, speed: Speed) -> float:
        """Time of the schedule that ``speed`` predicts to be faster, over that of the faster."""
        predicted = {name: self.work(name).seconds(speed) for name in SCHEDULES}
        # one_pass stands first, and is taken where they are equal
        chosen = min(predicted, key=lambda name: predicted[name])
        return self.measured(chosen) / min(map(self.measured, SCHEDULES))

    def __str__(self) -> str:
        head = "frozen head" if self.frozen else "full head"
        tile = ""
        if self.max_workspace_bytes is not None:
            tile = f", tile of {self.max_workspace_bytes / 2**20:.0f} MiB"
        return (
            f"T={self.tokens} D={self.hidden} V={self.vocabulary}, {self.dtype}, "
            f"precision={self.precision}, {head}{tile}"
        )


def fit(samples: Sequence[Sample]) -> tuple[float, ...]:
    """The coefficients named by ``FITTED``, of samples of one dtype: least relative error."""
    pairs = [(sample, schedule) for sample in samples for schedule in SCHEDULES]
    measured = torch.tensor([x.measured(name) for x, name in pairs], dtype=torch.float64)
    rows = [
        [float(getattr(work, _COUNTS[name])) for name in FITTED]
        for work in (x.work(name) for x, name in pairs)
    ]
    counts = torch.tensor(rows, dtype=torch.float64) / measured[:, None]
    costs = dict(zip(FITTED, _nonnegative(counts, torch.ones_like(measured)), strict=True))
    if not counts[:, FITTED.index("sums")].any():  # in fp32 they are like any other
        costs["sums"] = costs["matrix"]
    return tuple(_coefficient(name, cost) for name, cost in costs.items())


def _coefficient(name: str, cost: float) -> float:
    """A rate, or seconds; of three digits, since the fit has no more."""
    value = cost if name in DURATIONS.values() else 1 / max(cost, 1 / _FASTEST)
    return float(f"{value:.3g}")


def _nonnegative(a: torch.Tensor, b: torch.Tensor) -> list[float]:
    """``argmin ||a x - b||`` over x >= 0, coordinate by coordinate."""
    scale = a.norm(dim=0)
    scale = torch.where(scale > 0, scale, 1.0)
    a = a / scale
    gram, right = a.T @ a, a.T @ b
    x = torch.zeros_like(right)
    for _ in range(_SWEEPS):
        for j in range(len(x)):
            if gram[j, j] > 0:
                step = (right[j] - gram[j] @ x) / gram[j, j]
                x[j] = torch.clamp(x[j] + step, min=0.0)
    return (x / scale).tolist()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How often the model is right."""

    right: int
    count: int
    worst: float  # time of its choice over the best, at most
    misses: list[tuple[Sample, float]]  # the worst first

    def __str__(self) -> str:
        head = (
            f"the model takes the faster schedule in {self.right} of {self.count} cases, "
            f"and loses {self.worst - 1:.1%} at most"
        )
        return "\n".join([head, *(f"  {loss - 1:.1%}: {x}" for x, loss in self.misses)])


def verdict(samples: Sequence[Sample], speeds: dict[str, Speed]) -> Verdict:
    """``speeds`` by dtype."""
    losses = [(sample, sample.loss(speeds[sample.dtype])) for sample in samples]
    misses = sorted((pair for pair in losses if pair[1] > 1), key=lambda pair: -pair[1])
    return Verdict(
        right=len(losses) - len(misses),
        count=len(losses),
        worst=max((loss for _, loss in losses), default=1.0),
        misses=misses,
    )
