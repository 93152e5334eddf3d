"""Triton's interpreter, with sums that do not depend on the CPU, and faster."""

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


def patch_once() -> None:
    """Patch ``triton.language`` once a launch and module, not once a call of a function.

    The interpreter spends a third of its time on that. Versions without a scope of these patches
    stay as they are.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, patched = interpreter._patch_lang, set[int]()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:  # at the end of a launch
            super().restore()
            patched.clear()

    def patch_lang(function: Any) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # only the scope of the kernel itself is read
        patched.add(module)
        return patch(function)

    interpreter._LangPatchScope = Scope
    interpreter._patch_lang = patch_lang
