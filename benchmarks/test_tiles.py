"""GPU kernels at promising tiles; the best tiles belong in ``gpu_tiles.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt, race
from benchmarks.problem import make_problem
from benchmarks.providers.ours import run as run_ours
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, MODELS, Model, make_case
from benchmarks.timing import cuda_growth, make_timer
from grpo_kernels.backends import StatsGrad, Tile, output_view
from grpo_kernels.backends.gpu_tiles import (
    ROW_CONFIG,
    LinearConfig,
    RowConfig,
    aligned_config,
    device_class,
    gpu_chunk_rows,
)
from grpo_kernels.head import Head, Transform

_TOLERANCE = 1e-2  # of the largest value
_CHUNK_ROWS = (2048, 4096, 8192, 16384)
# rows, columns, depth, warps, stages; tiles without the copy engine last
_SHAPES = (
    *((128, 256, 64, 8, 4), (128, 128, 64, 4, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4)),
    *((128, 128, 32, 8, 4), (128, 64, 64, 4, 3)),
)
Outputs = dict[str, Any]  # tensors


@dataclass(frozen=True)
class Kernel:
    """A kernel that runs at every tile, on the logits of a head or on the head itself."""

    name: str  # "statistics", "gradient", "both", "fused forward" or "loss"
    rows: int
    dtype: str = "fp32"  # of logits
    model: Model = MODELS["qwen3-1.7b"]

    def facts(self) -> dict[str, Any]:
        facts = {"kernel": self.name, "model": self.model.name, "tokens": self.rows}
        head = {"hidden": self.model.hidden, "vocabulary": self.model.vocabulary}
        return {**facts, **head, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.name}, {self.model.name}, {self.rows} rows, {self.dtype}"

    def tiles(self) -> dict[str, Any]:
        """Return tiles by name; the first is the default."""
        if self.name == "loss":
            default = gpu_chunk_rows(torch.float32, self.model.vocabulary)
            return {f"{rows} rows": rows for rows in dict.fromkeys((default, *_CHUNK_ROWS))}
        device = device_class(torch.device("cuda"))
        if self.name == "fused forward":
            return {str(config): config for config in _linear_configs(aligned_config(device))}
        every = (RowConfig(*pair) for pair in product((2, 4, 8, 16), (1, 2, 4, 8)))
        configs = dict.fromkeys([ROW_CONFIG, *(x for x in every if x.num_warps * x.depth <= 64)])
        return {f"{x.num_warps} warps x {x.depth}": x.on(device) for x in configs}

    def on(self, device: str) -> Callable[[Any], Outputs]:
        """Return the function of a tile, with all other arguments bound."""
        from grpo_kernels.backends import triton

        if self.name == "loss":
            case = make_case("dapo", self.model.name, self.rows, "bf16")
            problem = make_problem(case, device)
            row_bytes = 4 * self.model.vocabulary
            return lambda rows: vars(run_ours(problem, max_workspace_bytes=rows * row_bytes))
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, std: float, dtype: str = "bf16") -> Tensor:
            empty = torch.empty(shape, dtype=DTYPES[dtype], device=device)
            return empty.normal_(std=std, generator=generator)

        vocabulary, hidden = self.model.vocabulary, self.model.hidden
        target = torch.arange(self.rows, device=device) % vocabulary
        if self.name == "fused forward":
            states = normal(self.rows, hidden, std=1.0)
            head = Head(normal(vocabulary, hidden, std=2 / hidden**0.5))
            inputs = states, head, target, "fp32", False
            return lambda config: triton.linear_stats(*inputs, config)._asdict()
        logits = normal(self.rows, vocabulary, std=2.0, dtype=self.dtype)
        return partial(_row_kernel, self.name, Tile(logits, target, Transform()))


_GPU = [
    Kernel("both", 2048),
    Kernel("fused forward", 8192),
    Kernel("loss", 32768),
    Kernel("statistics", 2048),
    Kernel("gradient", 2048),
    Kernel("both", 2048, "bf16"),
    *(Kernel("fused forward", 8192, model=MODELS[name]) for name in ("qwen3-8b", "gemma-3-4b")),
]
_NAMES = ("both", "statistics", "gradient")
CASES: dict[str, list[Kernel]] = {
    "tiny": [Kernel(name, 8, model=MODELS["tiny"]) for name in _NAMES],
    "gpu": [*_GPU[:3], Kernel("loss", 16384)],
    "gpu-full": _GPU,
}


def notes(case: Kernel) -> dict[str, str]:
    default, *others = case.tiles()
    return {default: "the default"} | dict.fromkeys(others, "")


def measure(case: Kernel, rows: Sequence[Row], session: Session) -> None:
    """Compare every tile with the default, and time those that agree in turns."""
    run, tiles = case.on(session.device), case.tiles()
    want = run(next(iter(tiles.values())))
    for row in rows:
        with attempt(row):  # it doesn't compile, or doesn't fit: a result like any other
            row.leave_out("wrong", _difference(run(tiles[row.provider]), want))
    runs = [(row, partial(run, tiles[row.provider])) for row in rows]
    if case.name == "loss":  # its memory depends on the tile
        for row, call in runs:
            if row.runs:
                row.info["extra_bytes"] = cuda_growth(call)[1]
                row.cells["MiB, results included"] = text.mib(row.extra_bytes)
    race(runs, session.rounds(), make_timer(session.device))


def _difference(got: Outputs, want: Outputs) -> str | None:
    """Name the results that differ from ``want`` by too large a share of its largest value."""
    for name, expected in want.items():
        if expected is None:
            continue
        error = (got[name].float() - expected.float()).abs().max()
        if not error <= _TOLERANCE * expected.abs().max():
            return f"{name} differs by {error:.1e}"
    return None


def _linear_configs(default: LinearConfig) -> list[LinearConfig]:
    found = [default]
    for block_t, block_v, block_d, num_warps, num_stages in _SHAPES:
        shape = dict(block_t=block_t, block_v=block_v, block_d=block_d, num_warps=num_warps)
        tiles = max(1, default.split_columns // block_v)
        found.append(replace(default, **shape, num_stages=num_stages, tiles=tiles))
    shares: list[dict[str, int]] = [{"tiles": 4}, {"tiles": 16}, {"group": 8}, {"group": 32}]
    return list(dict.fromkeys([*found, *(replace(default, **share) for share in shares)]))


def _row_kernel(name: str, tile: Tile, config: RowConfig) -> Outputs:
    """Run a kernel; one that overwrites its logits gets a copy, which is part of the time."""
    from grpo_kernels.backends.triton import dlogits_, logp_gradient_, row_stats

    if name == "statistics":
        return row_stats(tile, False, config)._asdict()
    own = tile._replace(logits=tile.logits.clone())
    if name == "both":
        stats, gradient = logp_gradient_(own, config)
        return stats._asdict() | {"gradient": gradient.dlogits}
    stats = row_stats(tile, False)
    grad_stats = StatsGrad(torch.ones_like(stats.logprobs))
    out = output_view(own.logits, torch.bfloat16)
    return {"gradient": dlogits_(own, stats, grad_stats, out, config)}


test_tiles = check_row
