"""Candidates for the tiles of a kernel: each is checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_BLOCK_ROWS = 256  # compared at a time: no large copies


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One value, and how to measure it."""

    value: tuple[int, ...]
    check: Callable[[], str | None]  # why its result is wrong; also its warm-up
    prepare: Callable[[], Any] = lambda: None  # before each run, outside of its time
    run: Callable[[], Any]


def difference(
    got: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float
) -> str | None:
    """Return what is anywhere further from ``want`` than a part of its largest value; NaN is."""
    for name, expected in want.items():
        parts = list(zip(_parts(got[name]), _parts(expected), strict=True))
        error = torch.stack([(a.float() - b.float()).abs().amax() for a, b in parts]).amax()
        largest = torch.stack([b.abs().amax() for _, b in parts]).amax()
        if not error <= tolerance * largest:
            return f"{name} differs by {error:.1e}"
    return None


def _parts(x: Tensor) -> tuple[Tensor, ...]:
    return torch.atleast_1d(x).split(_BLOCK_ROWS)
