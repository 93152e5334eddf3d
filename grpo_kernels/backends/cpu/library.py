"""The shared library of ``csrc``, by ctypes, and what is handed to it.

It is optional. Where it is missing, ``unavailable`` says why and the pure-torch kernels serve, with
the same numerics.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from ctypes import POINTER, c_char_p, c_int32
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.cpu.abi import (
    ABI_VERSION,
    EntriesView,
    Extraction,
    Gradient,
    Linear,
    NativeTile,
    Product,
    Stats,
)
from grpo_kernels.head import Transform

_LIBRARY = Path(__file__).parents[2] / "_native.so"  # by BuildNative of setup.py
_DONE = 0  # kDone of csrc/rows.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype of csrc/rows.h
HOW_TO_BUILD = "Reinstall grpo-kernels where a C++17 compiler (g++ or clang++) is on the PATH."


@functools.cache
def _load() -> ctypes.CDLL | str:
    """Load the library, or return one sentence that says why there is none."""
    if not _LIBRARY.exists():
        return "the native CPU extension was not built when grpo-kernels was installed"
    library = ctypes.CDLL(str(_LIBRARY))
    library.grpo_abi_version.restype = c_int32
    if library.grpo_abi_version() != ABI_VERSION:
        return f"the native CPU extension {_LIBRARY} belongs to another version of grpo-kernels"
    library.grpo_isa.argtypes = [c_int32]
    library.grpo_isa.restype = c_char_p
    for function, of, results in (
        (library.grpo_stats, NativeTile, Stats),
        (library.grpo_dlogits, NativeTile, Gradient),
        (library.grpo_linear, Linear, Stats),
        (library.grpo_extract, NativeTile, Extraction),
        (library.grpo_matmul, EntriesView, Product),
        (library.grpo_transposed_matmul, EntriesView, Product),
    ):
        function.argtypes = [POINTER(of), POINTER(results), c_int32, c_int32]
        function.restype = c_int32
        function.errcheck = _check_status  # type: ignore[assignment]
    return library


def _check_status(status: int, function: Any, arguments: tuple) -> None:
    """Raise torch.OutOfMemoryError where a kernel could not allocate its workspace."""
    if status == _DONE:
        return
    subject = arguments[0].tile if isinstance(arguments[0], Linear) else arguments[0]
    row = (
        f"{subject.slots} entries"
        if isinstance(subject, EntriesView)
        else f"{subject.columns} logits"
    )
    raise torch.OutOfMemoryError(
        f"{function.__name__}: can't allocate memory to work on {subject.rows} rows of {row}"
    )


def library() -> ctypes.CDLL:
    library = _load()
    assert isinstance(library, ctypes.CDLL), library
    return library


def unavailable() -> str | None:
    """Return one sentence that says why the native row kernels cannot run here, or None."""
    library = _load()
    return library if isinstance(library, str) else None


def isas() -> list[str]:
    """Return the instruction sets that this machine can run, best first.

    They are of "amx", "avx512_bf16", "avx512", "avx2" and "baseline".
    """
    names: list[str] = []
    while (name := library().grpo_isa(len(names))) is not None:
        names.append(name.decode())
    return names


@functools.cache
def announce_absence() -> None:
    """Warn, once in a process, that CPU tensors take the slower pure-torch path."""
    reason = unavailable()
    if reason is not None:
        warnings.warn(
            f"The pure-torch path serves on CPU, because {reason}. {HOW_TO_BUILD}",
            RuntimeWarning,
            stacklevel=3,
        )


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def stats_pointers(stats: RowStats) -> Stats:
    """Return the C view of the fields that the kernels fill."""
    return Stats(*(pointer(field) for field in stats[: len(Stats._fields_)]))


def empty_stats(rows: int, extras: bool) -> RowStats:
    """Return uninitialised statistics."""
    logp, entropy = torch.empty(rows), torch.empty(rows)
    lse = torch.empty(rows, dtype=torch.float64)
    if not extras:
        return RowStats(logp, entropy, lse)
    is_top1 = torch.empty(rows, dtype=torch.bool)
    return RowStats(logp, entropy, lse, is_top1, *(torch.empty(rows) for _ in range(3)))


def unit_stride(matrix: Tensor) -> Tensor:
    """Return the matrix, copied unless its columns are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def row_vector(vector: Tensor, rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
    assert vector.shape == (rows,) and vector.dtype == dtype, (vector.shape, vector.dtype)
    assert vector.device.type == "cpu", vector.device
    return vector.contiguous()


def tile_view(
    logits: Tensor | None, rows: int, columns: int, target: Tensor, transform: Transform
) -> NativeTile:
    """Return the C view of a tile of this shape; the caller keeps ``logits`` alive."""
    assert 0 < columns < 2**31 and transform.logit_scale > 0
    assert transform.softcap is None or transform.softcap > 0
    if logits is not None:
        assert logits.dtype in DTYPES and logits.device.type == "cpu", logits.dtype
        assert logits.shape == (rows, columns) and (columns == 1 or logits.stride(1) == 1), (
            logits.stride()
        )
        assert rows <= 1 or logits.stride(0) >= columns, logits.stride()
    target = row_vector(target, rows, torch.int64)
    temperature = transform.temperature
    row_temperature = row_vector(temperature, rows) if isinstance(temperature, Tensor) else None
    tile = NativeTile(
        logits=pointer(logits),
        rows=rows,
        columns=columns,
        row_stride=columns if logits is None else logits.stride(0),
        target=target.data_ptr(),
        row_temperature=pointer(row_temperature),
        temperature=0.0 if isinstance(temperature, Tensor) else temperature,
        logit_scale=transform.logit_scale,
        softcap=transform.softcap or 0.0,
        dtype=DTYPES[torch.float32 if logits is None else logits.dtype],
    )
    tile.alive = (target, row_temperature)
    return tile
