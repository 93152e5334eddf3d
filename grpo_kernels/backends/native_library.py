"""The library of native kernels: its structs and functions, through ctypes."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LIBRARY = Path(__file__).parents[1] / "_native.so"  # written by BuildNative in setup.py
_BUILD_AGAIN = "build the native CPU extension again, for example with pip install -e ."
_DONE = 0  # kDone of csrc/rows.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype of csrc/rows.h
# the structs of csrc/*.h: fields by C type; "floats", "doubles", ... point to (rows,) elements
STRUCTS = {
    "Tile": "pointer logits; int64 rows, columns, row_stride; int64s target; "
    "floats row_temperature; double temperature, logit_scale, softcap; int32 dtype",
    "Stats": "floats logp, entropy; doubles lse; bools is_top1; "
    "floats sum_sq_probs, max_logit, min_logit",
    "Gradient": "floats logp, entropy; doubles lse; floats dlogp, dentropy; pointer out; "
    "int64 out_stride; int32 out_dtype",
    "Divergence": "Tile teacher; doubles lse, teacher_lse; pointer sums; doubles logp_grad_sum; "
    "floats coefficient; pointer out; int64 out_stride; double beta; int32 kind, out_dtype",
    "Update": "pointer lora_u, lora_b; int64 lora_u_stride, rank",
    "Linear": "pointer hidden, weight, bias; int64 depth, hidden_stride, weight_stride; "
    "int32 dtype, rounded; Update update; Tile tile",
    "Entries": "pointer ids, values; int32s used; int64 rows, slots",
    "GradStats": "floats entropy, dlogp, dentropy",
    "Extraction": "GradStats grad_stats; floats logp; doubles lse; int32s keys; floats cuts; "
    "Entries out; floats error, error_l1, expected_error, norm",
    "TailSums": "GradStats grad_stats; doubles lse; floats weight; pointer cuts, sums; "
    "int64 num_cuts, blocks, sampled",
    "Product": "floats factor; pointer source, out; int64 source_stride, out_rows, out_stride, "
    "width; int32 source_dtype, out_dtype, add",
}
KERNELS = {
    "grpo_stats": ("Tile", "Stats"),
    "grpo_dlogits": ("Tile", "Gradient"),
    "grpo_divergence": ("Tile", "Divergence"),
    "grpo_linear": ("Linear", "Stats"),
    "grpo_extract": ("Tile", "Extraction"),
    "grpo_tail_sums": ("Tile", "TailSums"),
    "grpo_matmul": ("Entries", "Product"),
    "grpo_transposed_matmul": ("Entries", "Product"),
}


_VECTORS = {
    "bools": torch.bool,
    "int32s": torch.int32,
    "int64s": torch.int64,
    "floats": torch.float32,
    "doubles": torch.float64,
}


class View(ctypes.Structure):
    """A struct of numbers, other views and tensors; it keeps their memory alive.

    Vectors have one element for each of ``rows``.
    """

    dtypes: dict[str, torch.dtype | None]  # of vector fields

    def __init__(self, rows: int = 0, /, **values: Any) -> None:
        self.alive = values
        fields: dict[str, Any] = {}
        for name, value in values.items():
            dtype = self.dtypes[name]
            if isinstance(value, Tensor):
                is_vector = dtype is not None
                if not value.is_cpu or (
                    is_vector and (value.dtype is not dtype or value.shape != (rows,))
                ):
                    raise ValueError(f"native kernels: unexpected {name} {value}")
                if is_vector:
                    value = values[name] = value.contiguous()
                fields[name] = value.data_ptr()
            elif value is not None:
                fields[name] = value
        super().__init__(**fields)


VIEWS: dict[str, Any] = dict.fromkeys(("pointer", *_VECTORS), ctypes.c_void_p)
VIEWS |= {"double": ctypes.c_double, "int32": ctypes.c_int32, "int64": ctypes.c_int64}
for _name, _text in STRUCTS.items():
    _kinds: dict[str, str] = {}
    for _declaration in _text.split("; "):
        _kind, _, _fields = _declaration.partition(" ")
        _kinds |= dict.fromkeys(_fields.split(", "), _kind)
    _types = [(field, VIEWS[kind]) for field, kind in _kinds.items()]
    _dtypes = {field: _VECTORS.get(kind) for field, kind in _kinds.items()}
    VIEWS[_name] = type(_name, (View,), {"_fields_": _types, "dtypes": _dtypes})


@functools.cache
def load_library() -> Any:
    """Load the library, or return a sentence that says why there is none."""
    if not LIBRARY.exists():
        sources = LIBRARY.parents[1]
        if (sources / "csrc").exists():
            return (
                f"grpo_kernels is imported from its source folder {sources}, where the native CPU "
                "extension is not built; run from another folder, or run pip install -e . there"
            )
        return "the native CPU extension was not built when grpo-kernels was installed"
    library = ctypes.CDLL(str(LIBRARY))
    _check_structs(library)
    library.grpo_isa.argtypes = [ctypes.c_int32]
    library.grpo_isa.restype = ctypes.c_char_p
    for name, structs in KERNELS.items():
        function = getattr(library, name)
        views = (ctypes.POINTER(VIEWS[struct]) for struct in structs)
        function.argtypes = [*views, ctypes.c_int32, ctypes.c_int32]
        function.restype = ctypes.c_int32
        function.errcheck = _check_status
    return library


def _check_structs(library: Any) -> None:
    """Raise ImportError unless the library was compiled with the structs in this file."""
    struct_size = getattr(library, "grpo_struct_size", None)
    if struct_size is None:
        raise ImportError(f"{LIBRARY} comes from an older version of grpo_kernels; {_BUILD_AGAIN}")
    struct_size.argtypes = [ctypes.c_char_p]
    struct_size.restype = ctypes.c_int64
    for name in STRUCTS:
        size = struct_size(name.encode())
        expected = ctypes.sizeof(VIEWS[name])
        if size != expected:
            raise ImportError(
                f"{LIBRARY}: expected struct {name} of {expected} bytes, got {size}; {_BUILD_AGAIN}"
            )


def _check_status(status: int, function: Any, arguments: tuple) -> None:
    """Raise torch.OutOfMemoryError if a kernel could not allocate its workspace."""
    if status != _DONE:
        about = getattr(arguments[0], "tile", arguments[0])
        size = f"{about.slots} entries" if hasattr(about, "slots") else f"{about.columns} logits"
        raise torch.OutOfMemoryError(
            f"{function.__name__}: can't allocate memory to work on {about.rows} rows of {size}"
        )


def isas() -> list[str]:
    """Return the instruction sets that this machine can run, best first: "amx", "avx512_bf16",
    "avx512", "avx2" and "baseline"."""
    names: list[str] = []
    while (name := load_library().grpo_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def require(holds: bool, value: object) -> None:
    """Raise ValueError if a kernel would leave its memory. Unlike assert, also under ``-O``."""
    if not holds:
        raise ValueError(f"native kernels: unexpected {value}")
