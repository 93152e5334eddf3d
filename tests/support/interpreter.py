"""Triton's interpreter, with sums that do not depend on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def exact_dots() -> None:
    """Let ``tl.dot`` sum in float64 and round once.

    The interpreter calls numpy's matmul. In that of CPUs without AVX-512, the bits of a row depend
    on its place in the tile, so tests of equal bits would test the BLAS.
    """
    from triton.runtime import interpreter

    interpreter.np = SimpleNamespace(**(vars(np) | {"matmul": _matmul}))


def _matmul(a: Any, b: Any, dtype: Any) -> Any:
    return np.matmul(a, b, dtype=np.float64).astype(dtype)
