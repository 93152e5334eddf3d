"""The native backend: kernels of ``csrc`` for fp32, bf16 and fp16 on a CPU, by ctypes.

Where the library is missing ``unavailable`` says why, and plain torch serves, as exact.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends.base import (
    EXTRAS,
    STATS,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    empty_stats,
)
from grpo_kernels.backends.divergence import Divergence, Pair
from grpo_kernels.backends.entries import row_keys, sampled_blocks
from grpo_kernels.backends.torch_backend import Backend
from grpo_kernels.head import Head, Transform

_LIBRARY = Path(__file__).parents[1] / "_native.so"  # by BuildNative of setup.py
_DONE = 0  # kDone of csrc/rows.h
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # Dtype of csrc/rows.h
# of vectors that are not fp32
_TYPE = {
    "target": torch.int64,
    "keys": torch.int32,
    "lse": torch.float64,
    "teacher_lse": torch.float64,
    "pull": torch.float64,
}
# the structs of csrc/*.h: the fields, by their types in C
_STRUCTS = {
    "Tile": "pointer logits; int64 rows, columns, row_stride; pointer target, row_temperature; "
    "double temperature, logit_scale, softcap; int32 dtype",
    "Stats": "pointer logprobs, entropy, lse, is_top1, sum_sq_probs, max_logit, min_logit",
    "Update": "pointer lora_u, lora_b; int64 lora_u_stride, rank",
    "Linear": "pointer hidden, weight, bias; int64 depth, hidden_stride, weight_stride; "
    "int32 dtype, rounded; Update update; Tile tile",
    "Entries": "pointer ids, values, used; int64 rows, slots",
    "GradStats": "pointer entropy, dlogp, dentropy",
    "Extraction": "GradStats grad_stats; pointer logp, lse, keys, cuts; Entries out; "
    "pointer error, error_l1, expected_error, norm",
    "TailSums": "GradStats grad_stats; pointer lse, weight, cuts, sums; int64 num_cuts, blocks, sampled",
    "Product": "pointer factor, source, out; int64 source_stride, out_rows, out_stride, width; "
    "int32 source_dtype, out_dtype, add",
    "Divergence": "Tile teacher; pointer lse, teacher_lse, sums, pull, coefficient, out; "
    "int64 out_stride; double beta; int32 kind, out_dtype",
    "Gradient": "pointer logp, entropy, lse, dlogp, dentropy, out; int64 out_stride; "
    "int32 out_dtype",
}
_KERNELS = {
    "grpo_stats": ("Tile", "Stats"),
    "grpo_dlogits": ("Tile", "Gradient"),
    "grpo_divergence": ("Tile", "Divergence"),
    "grpo_linear": ("Linear", "Stats"),
    "grpo_extract": ("Tile", "Extraction"),
    "grpo_tail_sums": ("Tile", "TailSums"),
    "grpo_matmul": ("Entries", "Product"),
    "grpo_transposed_matmul": ("Entries", "Product"),
}


_NORMS = ("error", "error_l1", "expected_error", "norm")  # of Extraction and Entries


class _View(ctypes.Structure):
    """A struct of numbers, tensors and other views; keeps the tensors' memory alive."""

    def __init__(self, **values: Any) -> None:
        self.alive = values
        for name, value in values.items():
            if value is not None:
                setattr(self, name, value.data_ptr() if isinstance(value, Tensor) else value)


_VIEWS: dict[str, Any] = {"pointer": ctypes.c_void_p, "double": ctypes.c_double}
_VIEWS |= {"int32": ctypes.c_int32, "int64": ctypes.c_int64}
for _name, _text in _STRUCTS.items():
    _declared = (declaration.split(" ", 1) for declaration in _text.split("; "))
    _fields = [(field, _VIEWS[kind]) for kind, names in _declared for field in names.split(", ")]
    _VIEWS[_name] = type(_name, (_View,), {"_fields_": _fields})


@functools.cache
def _load() -> Any:
    """Load the library, or return one sentence that says why there is none."""
    if not _LIBRARY.exists():
        sources = _LIBRARY.parents[1]
        if (sources / "csrc").exists():
            return (
                f"grpo_kernels is imported from its sources, {sources}, where the native CPU "
                "extension is not built; run elsewhere, or pip install -e there"
            )
        return "the native CPU extension was not built when grpo-kernels was installed"
    library = ctypes.CDLL(str(_LIBRARY))
    _check_structs(library)
    library.grpo_isa.argtypes = [ctypes.c_int32]
    library.grpo_isa.restype = ctypes.c_char_p
    for name, structs in _KERNELS.items():
        function = getattr(library, name)
        views = (ctypes.POINTER(_VIEWS[struct]) for struct in structs)
        function.argtypes = [*views, ctypes.c_int32, ctypes.c_int32]
        function.restype = ctypes.c_int32
        function.errcheck = _check_status
    return library


def _check_structs(library: Any) -> None:
    """Raise ImportError unless the library was compiled with the structs of this file."""
    library.grpo_struct_size.argtypes = [ctypes.c_char_p]
    library.grpo_struct_size.restype = ctypes.c_int64
    for name in _STRUCTS:
        size, expected = library.grpo_struct_size(name.encode()), ctypes.sizeof(_VIEWS[name])
        if size != expected:
            raise ImportError(
                f"{_LIBRARY}: expected struct {name} of {expected} bytes, got {size}; "
                "build the native CPU extension again, for example with pip install -e ."
            )


def _check_status(status: int, function: Any, arguments: tuple) -> None:
    """Raise torch.OutOfMemoryError where a kernel could not allocate its workspace."""
    if status != _DONE:
        about = getattr(arguments[0], "tile", arguments[0])
        size = f"{about.slots} entries" if hasattr(about, "slots") else f"{about.columns} logits"
        raise torch.OutOfMemoryError(
            f"{function.__name__}: can't allocate memory to work on {about.rows} rows of {size}"
        )


def isas() -> list[str]:
    """Return which of "amx", "avx512_bf16", "avx512", "avx2" and "baseline" this machine can run,
    best first."""
    names: list[str] = []
    while (name := _load().grpo_isa(len(names))) is not None:
        names.append(name.decode())
    return names


class Native(Backend):
    """Kernels for fp32, bf16 and fp16.

    Rows are spread over ``torch.get_num_threads()`` threads; a row's result depends neither on that
    number (but for an adapter's) nor on the other rows. Scale, softcap and temperature must be
    positive.
    """

    name = "cpu"
    absence = (
        "The pure-torch path serves on CPU, because {}. Reinstall grpo-kernels where a C++17 "
        "compiler (g++ or clang++) is on the PATH."
    )

    def __init__(self, isa_rank: int = 0) -> None:
        self._isa_rank = isa_rank  # index into ``isas()``

    def unavailable(self) -> str | None:
        library = _load()
        return library if isinstance(library, str) else None

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cpu":
            return f"the tensors are on {device.type}"
        return "the native kernels have no fp64" if dtype == torch.float64 else None

    def numerics(self, dtype: torch.dtype, head: Head, precision: str, tiled: bool) -> list[str]:
        return [isas()[self._isa_rank]]

    def _run(self, kernel: str, subject: _View, **more: Any) -> None:
        """Call a kernel, whose second struct has the fields ``more``."""
        results = _VIEWS[_KERNELS[kernel][1]](**more)
        getattr(_load(), kernel)(subject, results, self._isa_rank, torch.get_num_threads())

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        stats = empty_stats(tile.target.numel(), tile.logits.device, extras)
        self._run("grpo_stats", _tile(*tile), **_filled(stats))
        return stats

    def dlogits_(self, tile: Tile, stats: RowStats, grad_stats: StatsGrad, out: Tensor) -> Tensor:
        assert out.shape == tile.logits.shape and out.stride(1) == 1, (out.shape, out.stride())
        assert out.dtype == tile.logits.dtype or tile.logits.dtype.itemsize == 4, out.dtype
        vectors = _vectors(
            tile.target.numel(),
            logp=stats.logprobs,
            entropy=stats.entropy,
            lse=stats.lse,
            dlogp=torch.zeros_like(stats.logprobs)
            if grad_stats.dlogp is None
            else grad_stats.dlogp,
            dentropy=grad_stats.dentropy,
        )
        where = {"out": out, "out_stride": out.stride(0), "out_dtype": _DTYPES[out.dtype]}
        self._run("grpo_dlogits", _tile(*tile), **vectors, **where)
        return out

    def divergence_sums(self, pair: Pair, divergence: Divergence) -> Tensor:
        sums = torch.empty((2, len(pair.lse)), dtype=torch.float64)
        self._compare(pair, divergence, sums=sums)
        return sums

    def divergence_gradient_(
        self, pair: Pair, divergence: Divergence, pull: Tensor, coefficient: Tensor, out: Tensor
    ) -> Tensor:
        vectors = _vectors(len(pull), pull=pull, coefficient=coefficient)
        where = {"out": out, "out_stride": out.stride(0), "out_dtype": _DTYPES[out.dtype]}
        self._compare(pair, divergence, **vectors, **where)
        return out

    def _compare(self, pair: Pair, divergence: Divergence, **results: Any) -> None:
        student, teacher, lse, teacher_lse = pair
        assert student.logits.shape == teacher.logits.shape, teacher.logits.shape
        self._run(
            "grpo_divergence",
            _tile(*student),
            teacher=_tile(*teacher),
            **_vectors(len(lse), lse=lse, teacher_lse=teacher_lse),
            beta=divergence.beta,
            kind=divergence.index,
            **results,
        )

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        return True

    def linear_stats(
        self,
        hidden: Tensor,  # (T, D)
        head: Head,
        target: Tensor,  # (T,)
        precision: str,
        extras: bool,
        logits: Tensor | None = None,  # (T, V) fp32, filled before the transform
    ) -> RowStats:
        assert precision in ("fp32", "input"), precision
        assert hidden.dtype in _DTYPES and hidden.device.type == "cpu", hidden
        assert logits is None or logits.dtype == torch.float32, logits
        hidden, weight = _unit_stride(hidden), _unit_stride(head.weight.to(hidden.dtype))
        bias = None if head.bias is None else head.bias.float().contiguous()
        columns = weight.shape[0]
        assert weight.shape[1] == hidden.shape[1], (weight.shape, hidden.shape)
        assert bias is None or bias.shape == (columns,), bias.shape
        stats = empty_stats(hidden.shape[0], hidden.device, extras)
        linear = _VIEWS["Linear"](
            hidden=hidden,
            weight=weight,
            bias=bias,
            depth=hidden.shape[1],
            hidden_stride=hidden.stride(0),
            weight_stride=weight.stride(0),
            dtype=_DTYPES[hidden.dtype],
            rounded=precision == "input",
            update=_low_rank(hidden, head),
            tile=_tile(logits, target, head.transform, columns),
        )
        self._run("grpo_linear", linear, **_filled(stats))
        return stats

    def forms_logits(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        return logits_dtype == torch.float32 and dtype in _DTYPES

    def tail_sums(
        self,
        tile: Tile,
        stats: RowStats,
        weight: Tensor,
        cuts: Tensor,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Tensor:
        assert gradient is None and cuts.dtype == torch.float32, "no logits"
        rows, columns = tile.logits.shape
        blocks, sampled = sampled_blocks(rows, columns)
        sums = torch.empty((rows, 2, len(cuts)))
        self._run(
            "grpo_tail_sums",
            _tile(*tile),
            outer=_outer(stats, grad_stats),
            **_vectors(rows, lse=stats.lse, weight=weight),
            cuts=cuts.contiguous(),
            sums=sums,
            num_cuts=len(cuts),
            blocks=blocks,
            sampled=sampled,
        )
        return sums

    def extract_entries(
        self,
        tile: Tile,
        stats: RowStats,
        seed: int,
        first: int,
        cuts: Tensor,
        slots: int,
        gradient: TileGradient | None = None,
        grad_stats: StatsGrad | None = None,
    ) -> Entries:
        assert gradient is None and slots > 0, slots
        keys = row_keys(seed, stats.lse, first)
        entries = Entries.empty(len(keys), slots, tile.logits.device)
        norms = {name: getattr(entries, name) for name in _NORMS}
        vectors = _vectors(len(keys), logp=stats.logprobs, lse=stats.lse, keys=keys, cuts=cuts)
        self._run(
            "grpo_extract",
            _tile(*tile),
            outer=_outer(stats, grad_stats),
            out=_listed(*entries[:3]),
            **vectors,
            **norms,
        )
        return entries

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        assert len(out) == len(factor), out.shape
        self._multiply("grpo_matmul", entries, factor, matrix, out, False)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool, count: int
    ) -> None:
        assert len(rows) == len(factor), rows.shape
        self._multiply("grpo_transposed_matmul", entries, factor, rows, out, add)

    def _multiply(
        self, kernel: str, entries: Entries, factor: Tensor, source: Tensor, out: Tensor, add: bool
    ) -> None:
        """Run a product with entries."""
        assert out.dtype in (source.dtype, torch.float32) and source.dtype in _DTYPES, source.dtype
        assert entries.values.dtype == torch.float32, entries.values.dtype
        assert source.shape[1] == out.shape[1], (source.shape, out.shape)
        source, target = _unit_stride(source), _unit_stride(out)
        self._run(
            kernel,
            _listed(*(x.contiguous() for x in entries[:3])),
            **_vectors(len(entries.used), factor=factor),
            source=source,
            out=target,
            source_stride=source.stride(0),
            out_rows=out.shape[0],
            out_stride=target.stride(0),
            width=out.shape[1],
            source_dtype=_DTYPES[source.dtype],
            out_dtype=_DTYPES[out.dtype],
            add=add,
        )
        if target is not out:
            out.copy_(target)


def _tile(
    logits: Tensor | None, target: Tensor, transform: Transform, columns: int | None = None
) -> _View:
    """Return the view of a tile; of one without logits, of so many ``columns``."""
    rows = target.numel()
    columns = logits.shape[1] if logits is not None else columns
    assert columns is not None and 0 < columns < 2**31 and transform.logit_scale > 0
    assert transform.softcap is None or transform.softcap > 0
    if logits is not None:
        assert logits.dtype in _DTYPES and logits.device.type == "cpu", logits.dtype
        assert logits.shape[0] == rows and (columns == 1 or logits.stride(1) == 1), logits.stride()
        assert rows <= 1 or logits.stride(0) >= columns, logits.stride()
    temperature = transform.temperature
    each = temperature if isinstance(temperature, Tensor) else None
    return _VIEWS["Tile"](
        **_vectors(rows, target=target, row_temperature=each),
        logits=logits,
        rows=rows,
        columns=columns,
        row_stride=columns if logits is None else logits.stride(0),
        temperature=temperature if each is None else 0.0,
        logit_scale=transform.logit_scale,
        softcap=transform.softcap or 0.0,
        dtype=_DTYPES[torch.float32 if logits is None else logits.dtype],
    )


# Rows for which torch forms the small factor of an update at a time: always as many, and each
# begins where a vector does, so that a row's bits are its own. MKL's depend on a row's alignment.
_FACTOR_ROWS = 256
_LANES = 16  # tokens of the widest vector
_RANK_STEP = 8  # kRankStep of csrc/linear.h


def _low_rank(hidden: Tensor, head: Head) -> _View:
    """Return the view of LoRA's (rank, tokens) and (V, rank) factors in fp32, and zeros."""
    if head.lora is None:
        return _VIEWS["Update"]()
    lora, (count, depth) = head.lora.wide(hidden.dtype), hidden.shape
    aligned = replace(lora, a=pad(lora.a, (0, -depth % _LANES)))
    missing = -lora.rank % _RANK_STEP
    outer = pad(lora.b, (0, missing)) if missing else lora.b.contiguous()
    inner = hidden.new_zeros(outer.shape[1], -(-count // _LANES) * _LANES, dtype=torch.float32)
    block = hidden.new_zeros(_FACTOR_ROWS, aligned.a.shape[1], dtype=torch.float32)
    for start in range(0, count, _FACTOR_ROWS):
        part = hidden[start : start + _FACTOR_ROWS]
        block[: part.shape[0], :depth] = part
        factor = aligned.project_down(block)[: part.shape[0]]
        inner[: lora.rank, start : start + part.shape[0]] = factor.t()
    return _VIEWS["Update"](
        inner=inner.detach(), outer=outer.detach(), inner_stride=inner.stride(0), rank=len(inner)
    )


def _filled(stats: RowStats) -> dict[str, Tensor | None]:
    """Return the statistics that the kernels fill."""
    return {name: getattr(stats, name) for name in (*STATS, *EXTRAS)}


def _outer(stats: RowStats, grad_stats: StatsGrad | None) -> _View:
    """Return the view of gradients of log-probabilities and entropy, or of none."""
    if grad_stats is None:
        return _VIEWS["Outer"]()
    vectors = _vectors(
        len(stats.logprobs),
        entropy=stats.entropy,
        dlogp=grad_stats.dlogp,
        dentropy=grad_stats.dentropy,
    )
    return _VIEWS["Outer"](**vectors)


def _listed(ids: Tensor, values: Tensor, used: Tensor) -> _View:
    return _VIEWS["Entries"](ids=ids, values=values, used=used, rows=len(ids), slots=ids.shape[1])


def _unit_stride(matrix: Tensor) -> Tensor:
    """Return the matrix, copied unless its columns are contiguous."""
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def _vectors(rows: int, **vectors: Tensor | None) -> dict[str, Tensor | None]:
    """Return (rows,) vectors as kernels read them; a name says the dtype."""
    for name, x in vectors.items():
        if x is not None:
            dtype = _TYPE.get(name, torch.float32)
            assert x.shape == (rows,) and x.dtype == dtype and x.device.type == "cpu", (name, x)
            vectors[name] = x.contiguous()
    return vectors
