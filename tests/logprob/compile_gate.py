"""Compiles every Triton kernel for real targets, without a GPU, and reads the resource usage.

A script for a process without ``TRITON_INTERPRET``: ``compile_gate.py TARGET`` prints the kernels
of the package and then one JSON object per compiled variant.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import grpo_kernels
from grpo_kernels.logprob import triton_dlogits, triton_reduce, triton_row_stats
from grpo_kernels.logprob.row_configs import ROW_CONFIGS
from grpo_kernels.logprob.tiles import DEFAULT_ROW_CONFIG, RowConfig, bits
from grpo_kernels.pointwise import PointwiseKernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# bytes of shared memory that one block can have
SHARED_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}


@dataclass(frozen=True)
class Case:
    """One variant of a kernel that the package launches."""

    kernel: Any  # triton.jit function
    types: dict[str, str]  # argument -> Triton type; a pointer is taken as 16-byte aligned
    constants: dict[str, Any]
    options: dict[str, Any]
    aligned: bool = True  # rows start at a multiple of 16 elements, as in most vocabularies

    @property
    def label(self) -> str:
        parts = [f"{k}={v}" for k, v in self.constants.items() if isinstance(v, bool)]
        kinds = [self.types[name] for name in ("logits_ptr", "out_ptr") if name in self.types]
        return " ".join([self.kernel.__name__, *kinds, *parts, f"aligned={self.aligned}"])


def kernels() -> dict[str, JITFunction]:
    """Every ``triton.jit`` function of the package whose name ends in ``_kernel``."""
    found = {}
    for info in pkgutil.walk_packages(grpo_kernels.__path__, "grpo_kernels."):
        if "triton" in info.name.rsplit(".", 1)[-1]:
            for name, value in vars(importlib.import_module(info.name)).items():
                if isinstance(value, JITFunction) and name.endswith("_kernel"):
                    found[name] = value
    return found


def cases(target: str) -> list[Case]:
    return [*_stats_cases(target), *_dlogits_cases(target), *_reduce_cases(), _pointwise_case()]


def _row_types(**more: str) -> dict[str, str]:
    scalars = dict.fromkeys(("inner", "outer"), "fp32")
    sizes = {"stride_row": "i64", "num_columns": "i32"}
    return {"target_ptr": "*i64", **sizes, **scalars, **more}


def _configs(kernel: str, dtype: torch.dtype, target: str) -> list[RowConfig]:
    """What may be launched on ``target``: the default first, then what was tuned there."""
    tuned = [
        RowConfig(*v) for k, v in ROW_CONFIGS.items() if k[:3] == (target, kernel, bits(dtype))
    ]
    return list(dict.fromkeys([DEFAULT_ROW_CONFIG, *tuned]))


def _row_case(kernel: Any, config: RowConfig, types: dict[str, str], flags: dict[str, Any]) -> Case:
    constants = dict(flags)
    if flags["ROW_TEMPERATURE"]:
        types = {**types, "temperature_ptr": "*fp32"}
    else:
        constants["temperature_ptr"] = None
    constants["BLOCK_V"] = config.columns(DTYPES[types["logits_ptr"].removeprefix("*")])
    return Case(kernel, types, constants, config.options)


def _variants(*names: str, thorough: bool) -> list[dict[str, bool]]:
    """Every setting of the flags, or all off and all on."""
    count = len(names)
    settings = itertools.product((False, True), repeat=count)
    chosen = settings if thorough else ((False,) * count, (True,) * count)
    return [dict(zip(names, values, strict=True)) for values in chosen]


def _stats_cases(target: str) -> Iterator[Case]:
    results = {f"{name}_ptr": "*fp32" for name in ("logp", "entropy", "lse", "sum_sq_probs")}
    names = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "EXTRAS")
    for name, dtype in DTYPES.items():
        types = _row_types(logits_ptr=f"*{name}", is_top1_ptr="*i1", **results)
        for config in _configs("stats", dtype, target):
            thorough = name == "fp32" and config == DEFAULT_ROW_CONFIG
            for flags in _variants(*names, thorough=thorough):
                case = _row_case(triton_row_stats._row_stats_kernel, config, types, flags)
                case.constants["LANES"] = config.lanes(dtype)
                yield case
            yield dataclasses.replace(case, aligned=False)


def _dlogits_cases(target: str) -> Iterator[Case]:
    vectors = {f"{name}_ptr": "*fp32" for name in ("logp", "entropy", "lse", "dlogp")}
    pairs = [("fp32", "bf16"), ("fp32", "fp16"), *((name, name) for name in DTYPES)]
    for dtype, out in pairs:
        types = _row_types(logits_ptr=f"*{dtype}", out_ptr=f"*{out}", **vectors)
        types["stride_out_row"] = "i64"
        for config in _configs("dlogits", DTYPES[dtype], target):
            thorough = (dtype, out) == ("fp32", "bf16") and config == DEFAULT_ROW_CONFIG
            yield from _dlogits_variants(config, types, thorough)


def _dlogits_variants(config: RowConfig, types: dict[str, str], thorough: bool) -> Iterator[Case]:
    names = ("HAS_SOFTCAP", "ROW_TEMPERATURE", "HAS_DENTROPY")
    for flags in _variants(*names, thorough=thorough):
        kernel = triton_dlogits._dlogits_kernel
        if flags["HAS_DENTROPY"]:
            case = _row_case(kernel, config, {**types, "dentropy_ptr": "*fp32"}, flags)
        else:
            case = _row_case(kernel, config, types, {**flags, "dentropy_ptr": None})
        yield case
    yield dataclasses.replace(case, aligned=False)


def _reduce_cases() -> Iterator[Case]:
    constants = {"BLOCK": triton_reduce._BLOCK}
    options = triton_reduce._OPTIONS
    partial = {"values_ptr": "*fp32", "weights_ptr": "*fp32", "partials_ptr": "*fp64"}
    types = {**partial, "length": "i32"}
    yield Case(triton_reduce._weighted_partials_kernel, types, constants, options)
    for dtype in ("fp32", "fp64"):
        types = {"values_ptr": f"*{dtype}", "bounds_ptr": "*i64", "sums_ptr": "*fp32"}
        yield Case(triton_reduce._segment_sum_kernel, types, constants, options)


def _pointwise_case() -> Case:
    """A printed kernel with the shared device functions and every kind of expression."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ratio = (x - y).clamp(-20, 20).exp()
        gate = torch.where((x > y) & (y != 0), torch.sigmoid(ratio), torch.tanh(y))
        return torch.minimum(ratio, y.log1p()) / gate.sqrt(), x > 0

    kernel = PointwiseKernel.trace(fn, 2, names=("x", "y"))
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out0_ptr": "*fp32", "out1_ptr": "*i1"}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    return Case(kernel.device_function, {**types, "length": "i32"}, {"BLOCK": 1024}, options)


def compile_case(case: Case, target: str) -> dict[str, Any]:
    """Resource usage of one variant on one target: registers, stack, spills, shared memory."""
    names = case.kernel.arg_names
    signature = {name: case.types.get(name, "constexpr") for name in names}
    pointers = [index for index, name in enumerate(names) if signature[name].startswith("*")]
    sizes = [i for i, name in enumerate(names) if name.startswith(("stride", "num_columns"))]
    divisible = [*pointers, *(sizes if case.aligned else [])]
    attrs = {(index,): [["tt.divisibility", 16]] for index in divisible}
    source = ASTSource(case.kernel, signature, constexprs=case.constants, attrs=attrs)
    compiled = triton.compile(source, target=TARGETS[target], options=case.options)
    usage = _cuda_usage if TARGETS[target].backend == "cuda" else _hip_usage
    return {
        "kernel": case.kernel.__name__,
        "case": case.label,
        "shared": compiled.metadata.shared,
        "shared_limit": SHARED_LIMITS[target],
        **usage(compiled.asm),
    }


def _cuda_usage(asm: dict[str, Any]) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    values = {key: int(value) for key, value in re.findall(r"(\w+):(\d+)", text)}
    return {"registers": values["REG"], "stack": values["STACK"], "spilled": values["LOCAL"]}


def _hip_usage(asm: dict[str, Any]) -> dict[str, int]:
    def field(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", asm["amdgcn"])[1])

    # spilled scalar registers go to lanes of vector registers, not to memory
    stack, spilled = field("private_segment_fixed_size"), field("vgpr_spill_count")
    return {"registers": field("vgpr_count"), "stack": stack, "spilled": spilled}


def main(target: str) -> None:
    print(json.dumps({"kernels": sorted(kernels())}))
    for case in cases(target):
        print(json.dumps(compile_case(case, target)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
