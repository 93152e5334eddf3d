"""Candidates for the tiles of the row kernels. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.tune.contest import Candidate
from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.backends import RowStats, StatsGradients
from grpo_kernels.backends import Tile as LogitsTile
from grpo_kernels.backends.configs.rows import DEFAULT_CHUNK_ROWS, DEFAULT_ROW_CONFIG, RowConfig
from grpo_kernels.backends.triton.dlogits import dlogits_
from grpo_kernels.backends.triton.row_loss import RowFunction, row_loss_
from grpo_kernels.backends.triton.row_stats import row_stats
from grpo_kernels.head import Transform
from grpo_kernels.losses import static_weights
from grpo_kernels.schedule.loss_stage import RowKernelStage

_WARPS, _DEPTHS = (2, 4, 8, 16), (1, 2, 4, 8)
# of the two; beyond it the registers of a multiprocessor no longer hold the tile
_LARGEST_TILE = 64
_BLOCK_ROWS = 256
_TOLERANCE = 1e-5  # of fp32 statistics: their sums differ in order


def row_configs() -> list[RowConfig]:
    """Return the configs to try, the default first."""
    every = (RowConfig(*pair) for pair in product(_WARPS, _DEPTHS))
    kept = (config for config in every if config.num_warps * config.depth <= _LARGEST_TILE)
    return list(dict.fromkeys([DEFAULT_ROW_CONFIG, *kept]))


@dataclass(frozen=True, kw_only=True)
class Tile:
    """A tile of logits as in training, and what the defaults make of it."""

    source: Tensor  # (C, V)
    work: Tensor  # (C, V); the gradient is left in it
    target: Tensor  # (C,)
    stats: RowStats
    outer: StatsGradients  # (C,) fp32
    dlogits: Tensor  # (C, V), 16-bit
    loss: RowFunction  # of rows whose policy is where it was when they were sampled
    values: tuple[Tensor | None, ...]  # (C,) each, its further arguments
    dloss: Tensor  # (C, V), 16-bit; that of the loss

    def of(self, logits: Tensor) -> LogitsTile:
        """Return the tile as the kernels get it."""
        return LogitsTile(logits, self.target, Transform())


def make_tile(dtype: torch.dtype, columns: int, device: torch.device, rows: int) -> Tile:
    """Return random logits of standard deviation 2; every row has a gradient."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.empty(rows, columns, dtype=dtype, device=device)
    source.normal_(std=2.0, generator=generator)
    target = torch.randint(columns, (rows,), generator=generator, device=device)
    outer = StatsGradients(torch.randn(rows, generator=generator, device=device) + 3.0)
    stats = row_stats(LogitsTile(source, target, Transform()), False, DEFAULT_ROW_CONFIG)
    out = torch.bfloat16 if dtype == torch.float32 else dtype
    work = source.clone()
    tile = LogitsTile(work, target, Transform())
    dlogits = dlogits_(tile, stats, outer, out, DEFAULT_ROW_CONFIG).clone()
    loss, values = _loss_of(target, stats.logp)
    work.copy_(source)
    return Tile(
        source=source,
        work=work,
        target=target,
        stats=stats,
        outer=outer,
        dlogits=dlogits,
        loss=loss,
        values=values,
        dloss=row_loss_(tile, loss, values, out, DEFAULT_ROW_CONFIG)[2].clone(),
    )


def _loss_of(target: Tensor, logp: Tensor) -> tuple[RowFunction, tuple[Tensor | None, ...]]:
    """Return the default loss with a KL term, which reads two more values."""
    config, ends = LossConfig(beta=0.04), torch.tensor([0, target.numel()], device=target.device)
    batch = TokenBatch.from_packed(
        target, logp.new_ones(1), ends, old_logprobs=logp, ref_logprobs=logp
    )
    stage = RowKernelStage(batch, static_weights(batch, config), config, torch.float32)
    return stage.function(slice(0, target.numel()))


def tile_rows(dtype: torch.dtype, columns: int, free: int) -> int:
    """Return how many rows a tile may have if its copies take half of ``free`` bytes at most."""
    copies = 4  # source, work and the defaults' gradients
    return max(1, min(DEFAULT_CHUNK_ROWS, free // (2 * copies * columns * dtype.itemsize)))


def candidates(kernel: str, tile: Tile) -> list[Candidate]:
    """Return the candidates of ``kernel``, one of ``ROW_KERNELS``."""
    make = {"stats": _stats, "dlogits": _dlogits, "loss": _loss}[kernel]
    return [make(tile, config) for config in row_configs()]


def _stats(tile: Tile, config: RowConfig) -> Candidate:
    def run() -> RowStats:
        return row_stats(tile.of(tile.source), False, config)

    def check() -> str | None:
        for name in ("logp", "entropy", "lse"):
            want, got = getattr(tile.stats, name), getattr(run(), name)
            if not torch.allclose(got, want, rtol=_TOLERANCE, atol=_TOLERANCE):
                return f"{name} differs by {(got - want).abs().max().item():.1e}"
        return None

    return Candidate(value=_value(config), check=check, prepare=lambda: None, run=run)


def _dlogits(tile: Tile, config: RowConfig) -> Candidate:
    def run() -> Tensor:
        logits, out_dtype = tile.of(tile.work), tile.dlogits.dtype
        return dlogits_(logits, tile.stats, tile.outer, out_dtype, config)

    def check() -> str | None:
        return _wrong_gradient(run(), tile.dlogits)

    return Candidate(value=_value(config), check=check, prepare=_restore(tile), run=run)


def _loss(tile: Tile, config: RowConfig) -> Candidate:
    def run() -> Tensor:
        logits, out_dtype = tile.of(tile.work), tile.dloss.dtype
        return row_loss_(logits, tile.loss, tile.values, out_dtype, config)[2]

    def check() -> str | None:
        return _wrong_gradient(run(), tile.dloss)

    return Candidate(value=_value(config), check=check, prepare=_restore(tile), run=run)


def _wrong_gradient(got: Tensor, want: Tensor) -> str | None:
    difference = _largest_difference(got, want)
    allowed = torch.finfo(want.dtype).eps * _largest(want)
    return None if difference <= allowed else f"the gradient differs by {difference:.1e}"


def _restore(tile: Tile) -> Callable[[], None]:
    def restore() -> None:
        tile.work.copy_(tile.source)

    return restore


def _value(config: RowConfig) -> tuple[int, ...]:
    return config.num_warps, config.depth


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference; NaN where any is."""
    return float(
        torch.stack([(x.float() - y.float()).abs().amax() for x, y in _chunks(a, b)]).amax()
    )


def _largest(x: Tensor) -> float:
    return float(torch.stack([chunk.abs().amax() for (chunk,) in _chunks(x)]).amax())


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Return ranges of rows, so that no large copy is made."""
    return zip(*(tensor.split(_BLOCK_ROWS) for tensor in tensors), strict=True)
