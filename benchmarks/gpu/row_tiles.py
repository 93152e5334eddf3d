"""Candidates for the tiles of the row kernels. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.candidates import Candidate, difference
from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.backends import StatsGradients, Tile
from grpo_kernels.backends.configs.rows import (
    DEFAULT_ROW_CONFIG,
    RowConfig,
    device_class,
)
from grpo_kernels.backends.triton.dlogits import dlogits_
from grpo_kernels.backends.triton.row_loss import RowFunction, row_loss_
from grpo_kernels.backends.triton.row_stats import row_stats
from grpo_kernels.head import Transform
from grpo_kernels.losses import static_weights
from grpo_kernels.schedule.loss_stage import RowKernelStage

_WARPS, _DEPTHS = (2, 4, 8, 16), (1, 2, 4, 8)
# of the two; beyond it the registers of a multiprocessor no longer hold the tile
_LARGEST_TILE = 64
_MOST_ROWS = 4096  # of a tile
_FP32_TOLERANCE = 1e-5  # sums differ in order

Run = Callable[[RowConfig], dict[str, Tensor]]


def row_configs() -> list[RowConfig]:
    """Return the configs to try, the default first."""
    every = (RowConfig(*pair) for pair in product(_WARPS, _DEPTHS))
    kept = (config for config in every if config.num_warps * config.depth <= _LARGEST_TILE)
    return list(dict.fromkeys([DEFAULT_ROW_CONFIG, *kept]))


def tile_rows(dtype: torch.dtype, columns: int, free: int) -> int:
    """Return how many rows a tile may have if its copies take half of ``free`` bytes at most."""
    copies = 4  # the tile, where it is restored from, and two gradients
    return max(1, min(_MOST_ROWS, free // (2 * copies * columns * dtype.itemsize)))


def candidates(
    kernel: str, dtype: torch.dtype, rows: int, columns: int, device: torch.device
) -> list[Candidate]:
    """Return the candidates of one of ``ROW_KERNELS``, on logits of standard deviation 2."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(rows, columns, dtype=dtype, device=device)
    logits.normal_(std=2.0, generator=generator)
    target = torch.randint(columns, (rows,), generator=generator, device=device)
    source = logits.clone()
    out = torch.bfloat16 if dtype == torch.float32 else dtype
    run = run_of(kernel, Tile(logits, target, Transform()), out)
    restore = partial(logits.copy_, source)  # a gradient is left in the logits
    want = {name: x.clone() for name, x in run(DEFAULT_ROW_CONFIG).items()}
    tolerance = _FP32_TOLERANCE if kernel == "stats" else torch.finfo(out).eps

    def check(config: RowConfig) -> str | None:
        return difference(run(config), want, tolerance)

    return [
        Candidate(
            value=(config.num_warps, config.depth),
            check=partial(check, config),
            prepare=restore,
            run=partial(run, config),
        )
        for config in (config.on(device_class(device)) for config in row_configs())
    ]


def run_of(kernel: str, tile: Tile, out: torch.dtype) -> Run:
    """Return the kernel, with everything but its config."""
    stats = row_stats(tile, False, DEFAULT_ROW_CONFIG)
    outer = StatsGradients(torch.ones_like(stats.logp))
    loss, values = _loss(tile.target, stats.logp)

    def run_stats(config: RowConfig) -> dict[str, Tensor]:
        found = row_stats(tile, False, config)
        return {"logp": found.logp, "entropy": found.entropy, "lse": found.lse}

    def run_dlogits(config: RowConfig) -> dict[str, Tensor]:
        return {"the gradient": dlogits_(tile, stats, outer, out, config=config)}

    def run_loss(config: RowConfig) -> dict[str, Tensor]:
        gradient = row_loss_(tile, loss, values, out, config)[2]
        named = {"the gradient": gradient.dlogits, "its factor": gradient.factor}
        return {name: value for name, value in named.items() if value is not None}

    return {"stats": run_stats, "dlogits": run_dlogits, "loss": run_loss}[kernel]


def _loss(target: Tensor, logp: Tensor) -> tuple[RowFunction, tuple[Tensor | None, ...]]:
    """Return the default loss with a KL term, which reads two more values."""
    config, ends = LossConfig(beta=0.04), torch.tensor([0, target.numel()], device=target.device)
    batch = TokenBatch.from_packed(
        target, logp.new_ones(1), ends, old_logprobs=logp, ref_logprobs=logp
    )
    stage = RowKernelStage(batch, static_weights(batch, config), config, torch.float32)
    return stage.function(slice(0, target.numel()))
