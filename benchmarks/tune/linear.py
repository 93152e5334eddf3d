"""Candidates for the forward without gradient: the fused GEMM's tiles, or tiles of logits.

Needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from benchmarks.shapes import Model
from benchmarks.tune.contest import Candidate
from grpo_kernels.backends import BACKENDS, RowStats
from grpo_kernels.backends.configs.linear import LinearConfig, default_config
from grpo_kernels.backends.configs.rows import bits, gpu_chunk_rows
from grpo_kernels.backends.triton.linear_launch import linear_stats
from grpo_kernels.engine import Route, Rows, RunOptions, row_chunks, sweep
from grpo_kernels.head import Head, Transform, logits_dtype

# rows, columns, depth, warps, stages, subtiles; each compiles without spills where it is tried
_ENGINE_SHAPES = (
    (128, 256, 64, 8, 4, 2),
    (128, 128, 64, 4, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 128, 64, 8, 4, 2),
)
_POINTER_SHAPES = (
    (128, 128, 32, 8, 3, 2),
    (128, 128, 64, 8, 3, 2),
    (128, 64, 64, 4, 3, 2),
)
# How the vocabulary is shared out, of the first candidate.
_SHARES = ({"tiles": 4}, {"tiles": 16}, {"group": 8}, {"group": 32})
TILES_OF_LOGITS = ()  # the value of the library's GEMM with row kernels
# Of logp, entropy and lse. A sum of another order may round a 16-bit logit the other way.
_TOLERANCES = {32: 3e-4, 16: 0.1}
_SLICE = slice(5, 133)


@dataclass(frozen=True, kw_only=True)
class Forward:
    """Rows before a head, and the statistics by tiles of logits."""

    hidden: Tensor  # (T, D) 16-bit
    head: Head
    target: Tensor  # (T,)
    precision: str
    want: RowStats


def linear_configs(device_class: str) -> list[LinearConfig]:
    """Return the configs to try, the default first."""
    default = default_config(device_class)
    shapes = _ENGINE_SHAPES if default.descriptors else _POINTER_SHAPES
    keys = ("block_t", "block_v", "block_d", "num_warps", "num_stages", "subtiles")
    found = [default]
    for shape in shapes:
        config = replace(default, **dict(zip(keys, shape, strict=True)))
        found.append(replace(config, tiles=max(1, default.split_columns // config.block_v)))
    if device_class == "sm_90":  # elsewhere the flat loop spills
        found += [replace(config, flat=1) for config in found]
    return list(dict.fromkeys([*found, *(replace(default, **share) for share in _SHARES)]))


def make_forward(
    model: Model, rows: int, precision: str, device: torch.device, dtype: torch.dtype
) -> Forward:
    """Return a forward on logits of standard deviation 2."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.empty(rows, model.hidden, dtype=dtype, device=device)
    weight = torch.empty(model.vocabulary, model.hidden, dtype=dtype, device=device)
    hidden.normal_(generator=generator)
    weight.normal_(std=2 / model.hidden**0.5, generator=generator)
    target = torch.randint(model.vocabulary, (rows,), generator=generator, device=device)
    head = Head(weight, None, Transform(softcap=model.softcap))
    want = _by_tiles(hidden, head, target, precision)
    return Forward(hidden=hidden, head=head, target=target, precision=precision, want=want)


def candidates(problem: Forward, device_class: str) -> list[Candidate]:
    """Return every tile of the fused GEMM, and the library's GEMM."""
    fused = [_fused(problem, config) for config in linear_configs(device_class)]
    return [*fused, _tiles(problem)]


def _fused(problem: Forward, config: LinearConfig) -> Candidate:
    def run(rows: slice = slice(None)) -> RowStats:
        hidden, head, target = problem.hidden[rows], problem.head, problem.target[rows]
        return linear_stats(hidden, head, target, problem.precision, False, config)

    def check() -> str | None:
        got, part = run(), run(_SLICE)
        if not all(torch.equal(a[_SLICE], b) for a, b in zip(got[:3], part[:3], strict=True)):
            return "a row's bits depend on its batch"
        return _difference(problem, got)

    return _candidate(astuple(config), check, run)


def _tiles(problem: Forward) -> Candidate:
    def run() -> RowStats:
        return _by_tiles(problem.hidden, problem.head, problem.target, problem.precision)

    return _candidate(TILES_OF_LOGITS, lambda: _difference(problem, run()), run)


def _candidate(
    value: tuple[int, ...], check: Callable[[], str | None], run: Callable[[], RowStats]
) -> Candidate:
    return Candidate(value=value, check=check, prepare=lambda: None, run=run)


def _by_tiles(hidden: Tensor, head: Head, target: Tensor, precision: str) -> RowStats:
    logits, columns = logits_dtype(hidden.dtype, precision), head.weight.shape[0]
    route = Route(
        backend=BACKENDS["triton"],
        options=RunOptions(precision=precision),
        logits=logits,
        columns=columns,
        tile_rows=gpu_chunk_rows(logits, columns, hidden.device),
        linear_stats=None,
    )
    rows = Rows(hidden=hidden, head=head, target=target)
    return sweep(rows, route, row_chunks(rows.count, route.tile_rows))[0]


def _difference(problem: Forward, got: RowStats) -> str | None:
    rounded = problem.precision == "input"
    tolerance = _TOLERANCES[bits(problem.hidden.dtype) if rounded else 32]
    for name in ("logp", "entropy", "lse"):
        error = (getattr(got, name) - getattr(problem.want, name)).abs().max().item()
        if not error <= tolerance:
            return f"{name} differs by {error:.1e}"
    return None
