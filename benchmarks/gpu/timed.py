"""Times of the parts that measure, and what they are held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.timing import make_timer, quick_collections

_WARM_UPS = 2
# what plain torch reaches on an H200: bf16 products of 8192 rows, and bytes of a copy, read or
# written; operations and bytes per second
PRODUCTS, TRAFFIC = 790e12, 4.2e12


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a call cannot do without."""

    operations: float = 0.0
    bytes: float = 0.0  # of a GEMM those beyond the same GEMM in bf16

    @property
    def floor(self) -> float:
        """The seconds of an H200, if either hides the other."""
        return max(self.operations / PRODUCTS, self.bytes / TRAFFIC)

    @property
    def unhidden(self) -> float:
        """The seconds of an H200, if neither does."""
        return self.operations / PRODUCTS + self.bytes / TRAFFIC


class Stopwatch:
    """Medians of a few calls, by device events on a GPU."""

    def __init__(self, device: torch.device, rounds: int) -> None:
        self._timer, self._rounds = make_timer(device.type), rounds

    def seconds(self, call: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
        """Return the seconds of ``call``; ``prepare`` runs before each, outside of its time."""
        for _ in range(_WARM_UPS):
            prepare()
            call()
        found = []
        with quick_collections():
            for _ in range(self._rounds):
                prepare()
                found.append(self._timer(call))
        return median(found)


def rates(seconds: float, cost: Cost) -> dict[str, float]:
    """Return what a call reached, and its time beside what an H200 should take."""
    if cost.operations:
        rate = {"tflops": cost.operations / seconds / 1e12}
    else:
        rate = {"gb_per_s": cost.bytes / seconds / 1e9}
    expected = {"floor_ms": cost.floor * 1e3, "unhidden_ms": cost.unhidden * 1e3}
    return {"ms": seconds * 1e3, **rate, **expected, "x_floor": seconds / cost.floor}
