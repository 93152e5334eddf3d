"""Every variant of every Triton kernel that the package launches, for :mod:`compile_gate`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from grpo_kernels.backends.gpu_tiles import (
    ROW_CONFIG,
    UNALIGNED_CONFIG,
    LinearConfig,
    RowConfig,
    aligned_config,
)
from grpo_kernels.backends.triton import dlogits, extract, gather
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.backends.triton.common import OPTIONS
from grpo_kernels.backends.triton.linear_stats import (
    _MERGED_ROWS,
    _merge_splits_kernel,
    constants,
    linear_stats_kernel,
)
from grpo_kernels.backends.triton.row_stats import _row_stats_kernel
from grpo_kernels.backends.triton.segment_sum import _BLOCK, _segment_sum_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One variant of a kernel that the package launches."""

    kernel: Any  # triton.jit function
    types: dict[str, str]  # argument -> Triton type; pointers are 16-byte aligned
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: bool = True  # rows start at a multiple of 16 elements, as in most vocabularies

    @property
    def label(self) -> str:
        parts = [f"{k}={v}" for k, v in self.constants.items() if isinstance(v, bool)]
        kinds = [
            self.types[name] for name in ("logits_ptr", "out_ptr", "x_ptr") if name in self.types
        ]
        return " ".join([self.kernel.__name__, *kinds, *parts, f"aligned={self.aligned}"])


def cases(target: str) -> list[Case]:
    rows = (*_stats_cases(target), *_dlogits_cases(target), *_logp_gradient_cases(target))
    linear = (*_linear_cases(target), *_merge_cases())
    entries = (*_extract_cases(target), *_gather_cases())
    return [*rows, *linear, *entries, *_reduce_cases(), _pointwise_case()]


def _row_types(**more: str) -> dict[str, str]:
    scalars = dict.fromkeys(("inner", "outer"), "fp32")
    sizes = {"stride_row": "i64", "num_columns": "i32"}
    return {"target_ptr": "*i64", **sizes, **scalars, **more}


def _row_case(kernel: Any, config: RowConfig, types: dict[str, str], flags: dict[str, Any]) -> Case:
    if flags["ROW_TEMPERATURE"]:
        types = {**types, "temperature_ptr": "*fp32"}
    logits = DTYPES[types["logits_ptr"].removeprefix("*")]
    constants = {**flags, "BLOCK_V": config.columns(logits)}
    return Case(kernel, types, _absent(kernel, types, constants), config.options)


def _variants(*names: str, thorough: bool) -> list[dict[str, bool]]:
    """Return every setting of the flags, or all off and all on."""
    count = len(names)
    settings = itertools.product((False, True), repeat=count)
    chosen = settings if thorough else ((False,) * count, (True,) * count)
    return [dict(zip(names, values, strict=True)) for values in chosen]


def _stats_cases(target: str) -> Iterator[Case]:
    names = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "EXTRAS")
    for name, dtype in DTYPES.items():
        types = _row_types(logits_ptr=f"*{name}", **_BASICS)
        types["stride_out_row"] = "i64"
        config = ROW_CONFIG.on(target)
        for flags in _variants(*names, thorough=name == "fp32"):
            results = {**types, **(_EXTRAS if flags["EXTRAS"] else {})}
            case = _row_case(_row_stats_kernel, config, results, flags)
            case.constants.update(config.blocks(dtype, True))
            yield case
        constants = case.constants | config.blocks(dtype, False)
        yield dataclasses.replace(case, constants=constants, aligned=False)


def _dlogits_cases(target: str) -> Iterator[Case]:
    vectors = {"logp_ptr": "*fp32", "lse_ptr": "*fp64", "dlogp_ptr": "*fp32"}
    pairs = [("fp32", "bf16"), ("fp32", "fp16"), *((name, name) for name in DTYPES)]
    for dtype, out in pairs:
        types = _row_types(logits_ptr=f"*{dtype}", out_ptr=f"*{out}", **vectors)
        types["stride_out_row"] = "i64"
        thorough = (dtype, out) == ("fp32", "bf16")
        yield from _dlogits_variants(ROW_CONFIG.on(target), types, thorough)


def _dlogits_variants(config: RowConfig, types: dict[str, str], thorough: bool) -> Iterator[Case]:
    names = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "HAS_DENTROPY")
    for flags in _variants(*names, thorough=thorough):
        entropy = {"entropy_ptr": "*fp32", "dentropy_ptr": "*fp32"} if flags["HAS_DENTROPY"] else {}
        case = _row_case(dlogits._dlogits_kernel, config, {**types, **entropy}, flags)
        yield case
    yield dataclasses.replace(case, aligned=False)


def _logp_gradient_cases(target: str) -> Iterator[Case]:
    """Yield the statistics with the gradient in the same read."""
    config, kernel = ROW_CONFIG.on(target), _row_stats_kernel
    for dtype in ("fp32", "bf16"):
        types = _row_types(logits_ptr=f"*{dtype}", out_ptr="*bf16", **_BASICS, unit_ptr="*fp32")
        types["stride_out_row"] = "i64"
        for flags in _variants("HAS_SOFTCAP", "ROW_TEMPERATURE", thorough=True):
            case = _row_case(kernel, config, types, {**flags, "EXTRAS": False})
            case.constants.update(config.blocks(DTYPES[dtype], True))
            yield case
        constants = case.constants | config.blocks(DTYPES[dtype], False)
        yield dataclasses.replace(case, constants=constants, aligned=False)


_SUMS = {f"{name}_ptr": "*fp32" for name in ("y_target", "peak", "total", "moment")}
_EXTRA_SUMS = {"squares_ptr": "*fp32", "least_ptr": "*fp32", "best_ptr": "*i32"}
_COUNTS = dict.fromkeys(("num_rows", "num_splits"), "i32")
_BASICS = {"logp_ptr": "*fp32", "entropy_ptr": "*fp32", "lse_ptr": "*fp64"}
_EXTRAS = {f"{name}_ptr": "*fp32" for name in ("sum_sq_probs", "max_logit", "min_logit")}
_EXTRAS |= {"is_top1_ptr": "*i1"}


def _linear_cases(target: str) -> Iterator[Case]:
    """Yield the fused GEMM: every kind of epilogue, with all of a head's options or none."""
    config, names = aligned_config(target), ("HAS_SOFTCAP", "EXTRAS", "ROUND", "OPTIONS")
    for flags in _variants(*names, thorough=True):
        yield _linear_case("bf16", config, flags)
    for flags in _variants(*names, thorough=False):
        yield _linear_case("fp16", config, flags)
    yield dataclasses.replace(_linear_case("bf16", UNALIGNED_CONFIG, flags), aligned=False)


def _linear_case(dtype: str, config: LinearConfig, flags: dict[str, bool]) -> Case:
    """Return a case. ``OPTIONS``: a bias, row temperatures, a D that is no multiple of the tile."""
    config = config.of_one_subtile() if flags["EXTRAS"] else config
    some = flags["OPTIONS"]
    optional = {"bias_ptr": f"*{dtype}", "temperature_ptr": "*fp32"} if some else {}
    optional |= _EXTRA_SUMS if flags["EXTRAS"] else {}
    logits = DTYPES[dtype] if flags["ROUND"] else torch.float32
    launched = constants(config, config.block_d + 8 * some, logits)
    flagged = {k: v for k, v in launched.items() if k not in config.options} | {
        "HAS_SOFTCAP": flags["HAS_SOFTCAP"],
        "HAS_BIAS": some,
        "ROW_TEMPERATURE": some,
        "EXTRAS": flags["EXTRAS"],
        "UPCAST": False,
    }
    types = {**_SUMS, **_COUNTS, **optional, "target_ptr": "*i64"}
    types |= _linear_types(dtype, config)
    absent = _absent(linear_stats_kernel, types, flagged)
    return Case(linear_stats_kernel, types, absent, config.options)


def _linear_types(dtype: str, config: LinearConfig) -> dict[str, str]:
    scalars = {"num_columns": "i32", "depth": "i32", "inner": "fp32", "outer": "fp32"}
    operands = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"}
    if config.descriptors:
        shapes = {"x_ptr": config.block_t, "weight_ptr": config.block_v}
        operands = {
            operand: f"tensordesc<{dtype}[{size},{config.block_d}]>"
            for operand, size in shapes.items()
        }
    return {**scalars, "stride_wv": "i64", **operands}


def _merge_cases() -> Iterator[Case]:
    kernel = _merge_splits_kernel
    for some in (False, True):
        types = {**_SUMS, **_COUNTS, **_BASICS, "target_ptr": "*i64", "outer": "fp32"}
        if some:
            types |= {**_EXTRA_SUMS, **_EXTRAS, "temperature_ptr": "*fp32"}
        flags = {"BLOCK": _MERGED_ROWS, "EXTRAS": some, "ROW_TEMPERATURE": some}
        yield Case(kernel, types, _absent(kernel, types, flags), OPTIONS)


def _extract_cases(target: str) -> Iterator[Case]:
    vectors = {"logp_ptr": "*fp32", "lse_ptr": "*fp64", "keys_ptr": "*i32", "allowed_ptr": "*fp32"}
    results = {f"{name}_ptr": "*fp32" for name in ("values", "error", "error_l1", "norm")}
    results |= {"ids_ptr": "*i32", "used_ptr": "*i32", "slots": "i32"}
    for (name, dtype), aligned in itertools.product(DTYPES.items(), (True, False)):
        types = _row_types(logits_ptr=f"*{name}", **vectors, **results)
        config = extract.config_for(dtype, target, aligned)
        variants = _variants("HAS_SOFTCAP", "ROW_TEMPERATURE", thorough=False)
        for flags in variants if aligned else variants[1:]:
            case = _row_case(extract._extract_kernel, config, types, flags)
            case.constants.update(config.blocks(dtype, aligned))
            yield dataclasses.replace(case, aligned=aligned)


def _gather_cases() -> Iterator[Case]:
    types = {"values_ptr": "*fp32", "factor_ptr": "*fp32", "slots": "i32", "num_columns": "i32"}
    types |= {"stride_out_row": "i64", "stride_matrix_row": "i64"}
    by_row = {"ids_ptr": "*i32", "used_ptr": "*i32"}
    by_column = {"bounds_ptr": "*i64", "order_ptr": "*i64"}
    blocks = {"BLOCK_K": gather._BLOCK_K, "BLOCK_N": gather._BLOCK_N}
    ones = {"stride_out_column": 1, "stride_matrix_column": 1}
    kernel = gather._gathered_sums_kernel
    for given, out in itertools.product(("fp32", "bf16"), repeat=2):
        pointers = {"matrix_ptr": f"*{given}", "out_ptr": f"*{out}"}
        for places, add in ((by_row, False), (by_column, False), (by_column, True)):
            posed = {**types, **pointers, **places}
            constants = {**blocks, **ones, "ADD": add}
            yield Case(kernel, posed, _absent(kernel, posed, constants), OPTIONS)


def _absent(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Return ``constants`` with the pointers that are not passed."""
    pointers = (name for name in kernel.arg_names if name.endswith("_ptr") and name not in types)
    return {**constants, **dict.fromkeys(pointers)}


def _reduce_cases() -> Iterator[Case]:
    types = {"values_ptr": "*fp32", "bounds_ptr": "*i64", "sums_ptr": "*fp32"}
    yield Case(_segment_sum_kernel, types, {"BLOCK": _BLOCK}, OPTIONS)


def _pointwise_case() -> Case:
    """Return a generated kernel with the shared device functions and every kind of expression."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ratio = (x - y).clamp(-20, 20).exp()
        gate = torch.where((x > y) & (y != 0), torch.sigmoid(ratio), torch.tanh(y))
        return torch.minimum(ratio, y.log1p()) / gate.sqrt(), x > 0

    kernel = PointwiseKernel.trace(fn, 2, names=("x", "y"))
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out0_ptr": "*fp32", "out1_ptr": "*i1"}
    return Case(kernel.kernel, {**types, "length": "i32"}, {"BLOCK": 1024}, OPTIONS)
