"""Every variant of every Triton kernel that the package launches, for :mod:`compile_gate`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl

from grpo_kernels.backends import KINDS, Entries
from grpo_kernels.backends.gpu_tiles import (
    ROW_CONFIG,
    UNALIGNED_CONFIG,
    LinearConfig,
    RowConfig,
    aligned_config,
)
from grpo_kernels.backends.triton import (
    anchored,
    divergence,
    dlogits,
    extract,
    packing,
    scaling,
    sums,
)
from grpo_kernels.backends.triton.codegen import PointwiseKernel
from grpo_kernels.backends.triton.common import OPTIONS
from grpo_kernels.backends.triton.linear_stats import (
    _MERGED_ROWS,
    _merge_splits_kernel,
    linear_stats_kernel,
)
from grpo_kernels.backends.triton.linear_tile import constants
from grpo_kernels.backends.triton.row_stats import _row_stats_kernel
from grpo_kernels.batch import SCALAR_FIELDS

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
        kinds = [
            self.types[name] for name in ("logits_ptr", "out_ptr", "x_ptr") if name in self.types
        ]
        some = [name for name in _OPTIONAL if name in self.types]
        return " ".join([self.kernel.__name__, *kinds, *some, f"aligned={self.aligned}"])


Types = dict[str, str]
_SOFTCAP, _TEMPERATURE = {"cap_scale": "fp32"}, {"temperature_ptr": "*fp32"}
_ENTROPY = {"entropy_ptr": "*fp32", "dentropy_ptr": "*fp32"}
_SUMS = {"y_target_ptr": "*fp32", "sums_ptr": "*fp32"}
_EXTRA_SUMS = {"best_ptr": "*i32"}
_COUNTS = dict.fromkeys(("num_rows", "num_splits"), "i32")
_BASICS = {"logprobs_ptr": "*fp32", "entropy_ptr": "*fp32", "lse_ptr": "*fp64"}
_EXTRAS = {f"{name}_ptr": "*fp32" for name in ("sum_sq_probs", "max_logit", "min_logit")}
_EXTRAS |= {"is_top1_ptr": "*i1"}
_UNIT = {"unit_ptr": "*fp32"}
_OUTER = dict.fromkeys(("entropy_ptr", "dlogp_ptr", "dentropy_ptr"), "*fp32")
_OPTIONAL = (
    "cap_scale",
    "unit_ptr",
    "temperature_ptr",
    "bias_ptr",
    "dentropy_ptr",
    "is_top1_ptr",
    "best_ptr",
)


def cases(target: str) -> list[Case]:
    rows = (*_stats_cases(target), *_dlogits_cases(target), *_logp_gradient_cases(target))
    rows = (*rows, *_divergence_cases(target))
    linear = (*_linear_cases(target), *_anchored_cases(target), *_merge_cases())
    entries = (*_extract_cases(), *_cut_cases(), *_gather_cases())
    small = (*_reduce_cases(), *_packing_cases(), *_scale_cases(), _pointwise_case())
    return [*rows, *linear, *entries, *small]


def _row_types(**more: str) -> Types:
    sizes = {"stride_row": "i64", "num_columns": "i32"}
    return {"target_ptr": "*i64", **sizes, "score_scale": "fp32", **more}


def _row_case(kernel: Any, config: RowConfig, types: Types, blocks: dict[str, int]) -> Case:
    return Case(kernel, types, _absent(kernel, types, blocks), config.options)


def _choices(count: int, thorough: bool) -> list[tuple[bool, ...]]:
    """Return which of ``count`` options are on: none, each one if ``thorough``, and all."""
    each = [tuple(index == on for index in range(count)) for on in range(count)]
    return [(False,) * count, *(each if thorough else ()), (True,) * count]


def _variants(types: Types, *optional: Types, thorough: bool) -> list[Types]:
    """Return the types with none of the optional ones, each one if ``thorough``, and all."""
    return [
        {**types, **{k: v for more in itertools.compress(optional, flags) for k, v in more.items()}}
        for flags in _choices(len(optional), thorough)
    ]


def _read_cases(
    target: str, dtype: str, types: Types, *optional: Types, thorough: bool
) -> Iterator[Case]:
    """Yield the kernel that reads rows; the last variant also where they are not aligned."""
    types = _row_types(logits_ptr=f"*{dtype}", stride_out_row="i64", **_BASICS, **types)
    config = ROW_CONFIG.on(target)
    for each in _variants(types, *optional, thorough=thorough):
        yield _row_case(_row_stats_kernel, config, each, config.blocks(DTYPES[dtype], True))
    case = _row_case(_row_stats_kernel, config, each, config.blocks(DTYPES[dtype], False))
    yield dataclasses.replace(case, aligned=False)


def _stats_cases(target: str) -> Iterator[Case]:
    for name in DTYPES:
        optional = (_SOFTCAP, _TEMPERATURE, _EXTRAS)
        yield from _read_cases(target, name, {}, *optional, thorough=name == "fp32")


def _logp_gradient_cases(target: str) -> Iterator[Case]:
    """Yield the statistics with the gradient in the same read."""
    types = {"out_ptr": "*bf16", "unit_ptr": "*fp32"}
    for name in ("fp32", "bf16"):
        yield from _read_cases(target, name, types, _SOFTCAP, _TEMPERATURE, thorough=True)


def _dlogits_cases(target: str) -> Iterator[Case]:
    vectors = {"logprobs_ptr": "*fp32", "lse_ptr": "*fp64", "dlogp_ptr": "*fp32"}
    pairs = [("fp32", "bf16"), ("fp32", "fp16"), *((name, name) for name in DTYPES)]
    config, kernel = ROW_CONFIG.on(target), dlogits._dlogits_kernel
    for dtype, out in pairs:
        types = _row_types(logits_ptr=f"*{dtype}", out_ptr=f"*{out}", **vectors)
        types["stride_out_row"] = "i64"
        thorough = (dtype, out) == ("fp32", "bf16")
        blocks = {"BLOCK_V": config.columns(DTYPES[dtype])}
        for each in _variants(types, _SOFTCAP, _TEMPERATURE, _ENTROPY, thorough=thorough):
            capped = {"HAS_SOFTCAP": "cap_scale" in each}
            case = _row_case(kernel, config, each | _SOFTCAP, blocks | capped)
            yield case
        yield dataclasses.replace(case, aligned=False)


def _divergence_cases(target: str) -> Iterator[Case]:
    vectors = dict.fromkeys(("lse_ptr", "teacher_lse_ptr"), "*fp64")
    vectors |= {"stride_teacher_row": "i64", "num_rows": "i32", "beta": "fp32"}
    vectors |= {"teacher_score_scale": "fp32", "stride_out_row": "i64"}
    sums = {"sums_ptr": "*fp64"}
    transforms = _SOFTCAP | _TEMPERATURE
    transforms |= {f"teacher_{name}": kind for name, kind in transforms.items()}
    config, kernel = ROW_CONFIG.on(target), divergence._divergence_kernel
    gradients = [
        {"logp_grad_sum_ptr": "*fp64", "coefficient_ptr": "*fp32", "out_ptr": f"*{out}"}
        for out in ("fp32", "bf16")
    ]
    for more, kind in itertools.product((sums, *gradients), range(len(KINDS))):
        types = _row_types(logits_ptr="*fp32", teacher_ptr="*fp32", **vectors, **more)
        blocks = {"BLOCK_V": config.columns(torch.float32), "KIND": kind}
        for each in _variants(types, transforms, thorough=False):
            case = _row_case(kernel, config, each, blocks)
            yield case
        yield dataclasses.replace(case, aligned=False)


def _linear_cases(target: str) -> Iterator[Case]:
    """Yield the fused GEMM with none, each and all of softcap, extras, rounding and options."""
    config = aligned_config(target)
    for dtype in ("bf16", "fp16"):
        for flags in _choices(4, thorough=dtype == "bf16"):
            yield _linear_case(dtype, config, *flags)
    every = _linear_case("bf16", UNALIGNED_CONFIG, True, True, True, True)
    yield dataclasses.replace(every, aligned=False)


def _linear_case(
    dtype: str, config: LinearConfig, softcap: bool, extras: bool, rounded: bool, options: bool
) -> Case:
    """Return a case. ``options``: a bias, row temperatures, a D that is no multiple of the tile."""
    config = config.of_one_subtile() if extras else config
    types = {**_SUMS, **_COUNTS, "target_ptr": "*i64", **_linear_types(dtype, config)}
    types |= _SOFTCAP if softcap else {}
    types |= {"bias_ptr": f"*{dtype}", **_TEMPERATURE} if options else {}
    types |= _EXTRA_SUMS if extras else {}
    logits = {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype] if rounded else None
    epilogue = {"ROUND_TO": logits, "SUBTILES": config.subtiles, "REPAIR": False}
    flagged = _product_constants(config, uneven=options) | epilogue
    absent = _absent(linear_stats_kernel, types, flagged)
    return Case(linear_stats_kernel, types, absent, config.options)


def _product_constants(config: LinearConfig, uneven: bool) -> dict[str, Any]:
    launched = constants(config, config.block_d + 8 * uneven) | {"UPCAST": False}
    return {k: v for k, v in launched.items() if k not in config.options}


def _anchored_cases(target: str) -> Iterator[Case]:
    """Yield the GEMM that stores exponentials, what repairs it, and the anchors."""
    for config, uneven in itertools.product((aligned_config(target), UNALIGNED_CONFIG), (0, 1)):
        aligned = config is not UNALIGNED_CONFIG
        types = {**_COUNTS, "anchor_ptr": "*fp32", "stride_exp": "i64"}
        types |= _linear_types("bf16", config) | (_TEMPERATURE if uneven else {})
        blocks = _product_constants(config, uneven=bool(uneven))
        parts = {"SUBTILES": config.subtiles}
        store = f"tensordesc<bf16[{config.block_t},{config.block_v // config.subtiles}]>"
        store = store if config.descriptors else "*bf16"
        moved = {"moved_ptr": "*i1", "unit_ptr": "*fp32", "exp_ptr": "*bf16"}
        stored = parts | {"FLAT": bool(config.flat)}
        for kernel, more, epilogue in (
            (anchored.anchored_kernel, {"exp_ptr": store, "sums_ptr": "*fp32"}, stored),
            (anchored._moved_kernel, moved | {"target_ptr": "*i64"}, {}),
        ):
            posed = _absent(kernel, types | more, blocks | epilogue)
            yield Case(kernel, types | more, posed, config.options, aligned)
        types = _linear_types("bf16", config) | _COUNTS | _SUMS | {"target_ptr": "*i64"}
        types |= _TEMPERATURE if uneven else {}
        epilogue = {"ROUND_TO": None, "REPAIR": True, **parts}
        posed = _absent(linear_stats_kernel, types, blocks | epilogue)
        yield Case(linear_stats_kernel, types, posed, config.options, aligned)
        types = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "anchor_ptr": "*fp32"}
        types |= {"target_ptr": "*i64", "num_rows": "i32", "depth": "i32", "stride_wv": "i64"}
        types |= {"num_columns": "i32"}
        blocks = {"BLOCK_T": anchored.TARGET_ROWS, "BLOCK_D": config.block_d, "UPCAST": False}
        blocks["EVEN_D"] = not uneven
        kernel, options = anchored._target_logits_kernel, anchored.OPTIONS
        yield Case(kernel, types, blocks, options, aligned)


def _linear_types(dtype: str, config: LinearConfig) -> dict[str, str]:
    scalars = {"num_columns": "i32", "depth": "i32", "score_scale": "fp32"}
    operands = {"x_ptr": f"*{dtype}", "weight_ptr": f"*{dtype}"}
    if config.descriptors:
        shapes = {"x_ptr": config.block_t, "weight_ptr": config.block_v}
        operands = {
            operand: f"tensordesc<{dtype}[{size},{config.block_d}]>"
            for operand, size in shapes.items()
        }
    return {**scalars, "stride_wv": "i64", **operands}


def _merge_cases() -> Iterator[Case]:
    types = {**_SUMS, **_COUNTS, **_BASICS, "target_ptr": "*i64", "score_scale": "fp32"}
    types |= {"stride_exp": "i64", "num_columns": "i32"}
    exponentials = {"exp_ptr": "*bf16", "unit_ptr": "*fp32", "anchor_ptr": "*fp32"}
    exponentials["moved_ptr"] = "*i1"
    every = _variants(types, {**_EXTRA_SUMS, **_EXTRAS, **_TEMPERATURE}, thorough=False)
    for each in (*every, types | exponentials, types | exponentials | _TEMPERATURE):
        blocks = {"BLOCK": _MERGED_ROWS, "UPCAST": False}
        absent = _absent(_merge_splits_kernel, each, blocks)
        yield Case(_merge_splits_kernel, each, absent, OPTIONS)


def _extract_cases() -> Iterator[Case]:
    vectors = {"lse_ptr": "*fp64", "cuts_ptr": "*fp32"}
    tails = {**vectors, "weight_ptr": "*fp32", "sums_ptr": "*fp32"}
    tails |= {"blocks": "i32", "sampled": "i32"}
    marks = {**vectors, "words_ptr": "*i32", "tail_ptr": "*fp32", "squares_ptr": "*fp32"}
    marks["groups"] = "i32"
    entries = dict.fromkeys((f"{name}_ptr" for name in Entries._fields), "*fp32")
    entries |= {"ids_ptr": "*i32", "used_ptr": "*i32", "logprobs_ptr": "*fp32", "slots": "i32"}
    reading, listing = extract._READING_WARPS, extract._LISTING_WARPS
    for kernel, own, blocks, warps in (
        (extract._tail_sums_kernel, tails, {"NUM_CUTS": 12, "BLOCK_K": 16}, reading),
        (extract._mark_kernel, {**marks, "seed": "i32", "first_row": "i32"}, {}, reading),
        (extract._list_kernel, {**marks, **entries}, {"BLOCK": extract._LISTED_ENTRIES}, listing),
    ):
        config = RowConfig(num_warps=warps, depth=1)
        for name, of_gradient in (*((name, {}) for name in DTYPES), ("bf16", _UNIT)):
            types = _row_types(logits_ptr=f"*{name}", **own, **of_gradient)
            options = (_SOFTCAP, _TEMPERATURE, *(() if of_gradient else (_OUTER,)))
            for each in _variants(types, *options, thorough=name == "fp32"):
                case = _row_case(kernel, config, each, blocks)
                yield case
            yield dataclasses.replace(case, aligned=False)


def _cut_cases() -> Iterator[Case]:
    blocks = {"NUM_CUTS": 12, "BLOCK_K": 16, "BLOCK": extract._WEIGHED_ROWS}
    types = {"weight_ptr": "*fp32", "cuts_ptr": "*fp32", "num_rows": "i32", "allowed": "fp32"}
    rows = {**types, "logprobs_ptr": "*fp32", "lse_ptr": "*fp64", "score_scale": "fp32"}
    kernel = extract._weigh_kernel
    for each in _variants(rows, _TEMPERATURE, {"dlogp_ptr": "*fp32"}, thorough=False):
        yield Case(kernel, each, _absent(kernel, each, blocks), OPTIONS)
    sums = {**types, "tried_ptr": "*fp32", "sums_ptr": "*fp32", "part": "fp32"}
    yield Case(extract._pick_kernel, sums, blocks | {"BLOCK": extract._WEIGHED_ROWS // 16}, OPTIONS)


def _gather_cases() -> Iterator[Case]:
    ints, floats = ("used_ptr", "ids_ptr", "all_ids_ptr", "all_rows_ptr"), ("values_ptr",)
    flat = dict.fromkeys(ints, "*i32") | dict.fromkeys((*floats, "all_values_ptr"), "*fp32")
    flat |= {"starts_ptr": "*i64", "factor_ptr": "*fp32", "slots": "i32"}
    yield Case(sums._flatten_kernel, flat, {"BLOCK": sums._PIECE}, OPTIONS)
    blocks = {"BLOCK_K": sums._ELEMENTS // sums._MOST_COLUMNS, "BLOCK_N": sums._MOST_COLUMNS}
    ones = {"stride_out_column": 1, "stride_column": 1}
    sizes = {"values_ptr": "*fp32", "num_columns": "i32", "stride_row": "i64"}
    of_out = {**sizes, "stride_out_row": "i64"}
    by_row = {"used_ptr": "*i32", "ids_ptr": "*i32", "factor_ptr": "*fp32", "slots": "i32"}
    by_id = {"places_ptr": "*i32", "pieces_ptr": "*fp32"}
    for given in ("fp32", "bf16"):
        posed = {**sizes, **by_id, "ids_ptr": "*i32", "matrix_ptr": f"*{given}"}
        constants = {**blocks, "stride_column": 1, "PIECE": sums._PIECE}
        yield Case(sums._pieces_kernel, posed, constants, OPTIONS)
    for given, out in itertools.product(("fp32", "bf16"), repeat=2):
        pointers = {"matrix_ptr": f"*{given}", "out_ptr": f"*{out}"}
        yield Case(sums._rows_kernel, {**of_out, **by_row, **pointers}, blocks | ones, OPTIONS)
        posed = {**of_out, **by_id, "bounds_ptr": "*i64", **pointers}
        for add in (False, True):
            constants = {**blocks, **ones, "PIECE": sums._PIECE, "ADD": add}
            yield Case(sums._columns_kernel, posed, constants, OPTIONS)


def _absent(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> dict[str, Any]:
    """Return ``constants`` with what is not passed."""
    absent = (x for x in kernel.arg_names if x.endswith("_ptr") or x.endswith("cap_scale"))
    return {**constants, **dict.fromkeys(x for x in absent if x not in types)}


def _reduce_cases() -> Iterator[Case]:
    types = {"values_ptr": "*fp32", "bounds_ptr": "*i64", "sums_ptr": "*fp32"}
    yield Case(sums._segment_sum_kernel, types, {"BLOCK": sums._BLOCK_T}, OPTIONS)


def _packing_cases() -> Iterator[Case]:
    """Yield tokens with nothing but advantages, and with all that there may be."""
    kernel, sizes = packing._pack_tokens_kernel, dict.fromkeys(packing._SIZES, "i32")
    integers = ("ids", "packed_ids", "rows", "offsets", "report")
    types = {f"{name}_ptr": "*i64" for name in integers} | sizes
    columns = [f"{name}_ptr" for name in packing.COLUMNS]
    least = {"advantages_ptr": "*fp32", "table_ptr": "*fp32"}
    fields = dict.fromkeys((f"{name}_ptr" for name in SCALAR_FIELDS), "*fp64")
    fields |= {"cu_seqlens_ptr": "*i32", "prompt_tokens_ptr": "*i64"}
    variants = [least]
    for mask, column, table in (
        ("*i1", "*fp32", "*fp32"), ("*i64", "*bf16", "*fp32"), ("*fp32", "*fp64", "*fp64"),
    ):  # fmt: skip
        every = dict.fromkeys(columns, column) | {"table_ptr": table, "mask_ptr": mask}
        variants += [every, every | fields]
    for more in variants:
        posed = types | more
        constants = {"BLOCK": packing.BLOCK, "PER_TOKEN": "cu_seqlens_ptr" in more}
        yield Case(kernel, posed, _absent(kernel, posed, constants), packing.OPTIONS)
    posed = {"report_ptr": "*i64", "passed_ptr": "*i1", "num_sequences": "i32"}
    posed |= {"length": "i32", "active_length": "i32"}
    yield Case(
        packing._check_report_kernel, posed, {"BLOCK": packing._CHECKED_BLOCK}, packing.OPTIONS
    )


def _scale_cases() -> Iterator[Case]:
    for dtype, out in (("fp32", "bf16"), ("fp32", "fp16"), ("bf16", "bf16")):
        types = {"x_ptr": f"*{dtype}", "out_ptr": f"*{out}", "scale_ptr": "*fp32", "length": "i64"}
        constants = {"INTERPRETED": False, "BLOCK": scaling._BLOCK}
        yield Case(scaling._scale_kernel, types, constants, OPTIONS)


def _pointwise_case() -> Case:
    """Return a generated kernel with the shared device functions and every kind of expression."""

    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ratio = (x - y).clamp(-20, 20).exp()
        gate = torch.where((x > y) & (y != 0), torch.sigmoid(ratio), torch.tanh(y))
        return torch.minimum(ratio, y.log1p()) / gate.sqrt(), x > 0

    kernel = PointwiseKernel.trace(fn, ("x", "y"))
    types = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out0_ptr": "*fp32", "out1_ptr": "*i1"}
    return Case(kernel.kernel, {**types, "length": "i32"}, {"BLOCK": 1024}, OPTIONS)
