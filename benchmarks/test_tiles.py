"""GPU kernels at the tiles that are worth a try; the best belong into ``gpu_tiles.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.conftest import Session
from benchmarks.measure import attempt, free, time_in_turns
from benchmarks.problem import make_problem
from benchmarks.providers.ours import run as run_ours
from benchmarks.results import Row
from benchmarks.shapes import MODELS, make_case
from grpo_kernels.backends import RowStats, StatsGrad, Tile
from grpo_kernels.backends.gpu_tiles import (
    ROW_CONFIG,
    LinearConfig,
    RowConfig,
    aligned_config,
    device_class,
    gpu_chunk_rows,
)
from grpo_kernels.head import Head, Transform

_HEAD = "qwen3-1.7b"
_CHUNK_ROWS = (2048, 4096, 8192, 16384)
# rows, columns, depth, warps, stages; those without the copy engine last
_SHAPES = (
    *((128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4)),
    *((128, 128, 32, 8, 4), (128, 64, 64, 4, 3)),
)
Run = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Kernel:
    """What runs at every tile, on the logits of a head or on the head itself."""

    name: str  # "statistics", "gradient", "both", "fused forward" or "loss"
    model: str
    rows: int
    dtype: str = "fp32"  # of logits

    def facts(self) -> dict[str, Any]:
        model = MODELS[self.model]
        return {
            "kernel": self.name,
            "model": self.model,
            "tokens": self.rows,
            "hidden": model.hidden,
            "vocabulary": model.vocabulary,
            "dtype": self.dtype,
        }

    def __str__(self) -> str:
        return f"{self.name}, {self.model}, {self.rows} rows, {self.dtype}"

    def candidates(self) -> dict[str, Any]:
        """Return tiles by how they are written; the first is the default."""
        if self.name == "loss":
            default = gpu_chunk_rows(torch.float32, MODELS[self.model].vocabulary)
            return {f"{rows} rows": rows for rows in dict.fromkeys((default, *_CHUNK_ROWS))}
        if self.name == "fused forward":
            return {str(config): config for config in _linear_configs()}
        every = (RowConfig(*pair) for pair in product((2, 4, 8, 16), (1, 2, 4, 8)))
        configs = dict.fromkeys([ROW_CONFIG, *(x for x in every if x.num_warps * x.depth <= 64)])
        device = device_class(torch.device("cuda"))
        return {f"{x.num_warps} warps x {x.depth}": x.on(device) for x in configs}

    def run_of(self, device: str) -> Callable[[Any], dict[str, Tensor]]:
        """Return what runs at a tile, with everything but it."""
        if self.name == "loss":
            case = make_case("dapo", self.model, self.rows, "bf16")
            return partial(_loss, make_problem(case, device))
        model = MODELS[self.model]
        generator = torch.Generator(device).manual_seed(0)
        dtype = torch.bfloat16 if self.dtype == "bf16" else torch.float32

        def normal(*shape: int, std: float, dtype: torch.dtype) -> Tensor:
            empty = torch.empty(shape, dtype=dtype, device=device)
            return empty.normal_(std=std, generator=generator)

        target = torch.arange(self.rows, device=device) % model.vocabulary
        if self.name == "fused forward":
            bf16 = torch.bfloat16
            hidden = normal(self.rows, model.hidden, std=1.0, dtype=bf16)
            weight = normal(model.vocabulary, model.hidden, std=2 / model.hidden**0.5, dtype=bf16)
            return partial(_linear, hidden, Head(weight), target)
        logits = normal(self.rows, model.vocabulary, std=2.0, dtype=dtype)
        return partial(_row_kernel, self.name, Tile(logits, target, Transform()))


_GPU = [
    Kernel("both", _HEAD, 2048),
    Kernel("fused forward", _HEAD, 8192),
    Kernel("loss", _HEAD, 32768),
    Kernel("statistics", _HEAD, 2048),
    Kernel("gradient", _HEAD, 2048),
    Kernel("both", _HEAD, 2048, "bf16"),
    *(Kernel("fused forward", name, 8192) for name in ("qwen3-8b", "gemma-3-4b")),
]
CASES = {
    "tiny": [Kernel(name, "tiny", 8) for name in ("both", "statistics", "gradient")],
    "quick": [],
    "cpu": [],
    "gpu": _GPU[:3],
    "gpu-full": _GPU,
}


def names(case: Kernel) -> list[str]:
    return list(case.candidates())


def measure(case: Kernel, names: Sequence[str], session: Session) -> list[Row]:
    """Compare every tile with the default, and time those that agree in turns."""
    run, every = case.run_of(session.device), case.candidates()
    default = next(iter(every))
    rows = [Row(name, "the default" if name == default else "") for name in names]
    want = run(every[default])
    for row in rows:
        with attempt(row):  # it does not compile, or does not fit: a result like any other
            row.leave_out("wrong", difference(run(every[row.provider]), want))
    runs = [(row, partial(run, every[row.provider])) for row in rows]
    time_in_turns(runs, session.device, session.rounds)
    free(session.device)
    return rows


def difference(
    got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-2
) -> str | None:
    """Return what is anywhere further from ``want`` than a part of its largest value; NaN is."""
    for name, expected in want.items():
        error = (got[name].float() - expected.float()).abs().max()
        if not error <= tolerance * expected.abs().max():
            return f"{name} differs by {error:.1e}"
    return None


def _linear_configs() -> list[LinearConfig]:
    default = aligned_config(device_class(torch.device("cuda")))
    found = [default]
    for block_t, block_v, block_d, num_warps, num_stages in _SHAPES:
        shape = dict(block_t=block_t, block_v=block_v, block_d=block_d, num_warps=num_warps)
        tiles = max(1, default.split_columns // block_v)
        found.append(replace(default, **shape, num_stages=num_stages, tiles=tiles))
    shares: list[dict[str, int]] = [{"tiles": 4}, {"tiles": 16}, {"group": 8}, {"group": 32}]
    return list(dict.fromkeys([*found, *(replace(default, **share) for share in shares)]))


def _loss(problem: Any, rows: int) -> dict[str, Tensor]:
    size = rows * problem.case.model.vocabulary * 4
    result = run_ours(problem, max_workspace_bytes=size)
    return {name: getattr(result, name) for name in problem.work.outputs}


def _linear(hidden: Tensor, head: Head, target: Tensor, config: LinearConfig) -> dict[str, Tensor]:
    from grpo_kernels.backends.triton import linear_stats

    return _named(linear_stats(hidden, head, target, "fp32", False, config))


def _row_kernel(name: str, tile: Tile, config: RowConfig) -> dict[str, Tensor]:
    """Run one of the kernels; what overwrites its logits gets a copy, which is timed as well."""
    from grpo_kernels.backends.triton import dlogits_, logp_gradient_, row_stats

    if name == "statistics":
        return _named(row_stats(tile, False, config))
    own = tile._replace(logits=tile.logits.clone())
    if name == "both":
        stats, gradient = logp_gradient_(own, config)
        return _named(stats) | {"gradient": gradient.dlogits}
    stats = row_stats(tile, False)
    outer = StatsGrad(torch.ones_like(stats.logp))
    return {"gradient": dlogits_(own, stats, outer, torch.bfloat16, config=config)}


def _named(stats: RowStats) -> dict[str, Tensor]:
    return {"logp": stats.logp, "entropy": stats.entropy, "lse": stats.lse}


def test_tiles(row: Row) -> None:
    """Time a kernel at a tile."""
    assert row.seconds
