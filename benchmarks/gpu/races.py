"""Races of the row kernels, which write a gradient over the logits that they read.

A race shows as bits that change from one run to the next, or from one number of warps to another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks.gpu.notes import Notes, bits_of
from benchmarks.gpu.row_tiles import run_of
from grpo_kernels.backends import Tile
from grpo_kernels.backends.configs.rows import DEFAULT_ROW_CONFIG, RowConfig
from grpo_kernels.head import Transform

_VOCABULARIES = {False: (151936, 50257, 2049, 2048, 2047, 53, 1), True: (257, 53, 1)}
_WARPS, _DEPTHS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8)
_SMALL = (DEFAULT_ROW_CONFIG, RowConfig(1, 1))
_ROWS = {False: 528, True: 2}
_REPEATS = {False: 20, True: 3}
_DISTURBED = (DEFAULT_ROW_CONFIG, RowConfig(8, 2), RowConfig(32, 1), RowConfig(1, 8))
_HAMMER_BYTES = 1 << 30


def races(notes: Notes, small: bool) -> None:
    """Compare bits over repeated runs of both kernels, and over the tiles of the gradient's."""
    configs = _SMALL if small else _every_config()
    disturbed, repeats = _SMALL if small else _DISTURBED, _REPEATS[small]
    tiles = {columns: _Rows(notes, _ROWS[small], columns) for columns in _VOCABULARIES[small]}
    hammer = _hammer(notes.device)
    notes.every(
        (f"loss {config}", partial(_repeated, notes, tiles[columns], config, repeats, hammer))
        for config in disturbed
        for columns in list(tiles)[:2]
    )
    notes.every((f"dlogits {config}", partial(_tiled, notes, tiles, config)) for config in configs)


def _every_config() -> tuple[RowConfig, ...]:
    """Return all tiles, the largest last: they take longest to compile."""
    every = (RowConfig(*pair) for pair in product(_WARPS, _DEPTHS))
    largest_last = sorted(every, key=lambda config: config.num_warps * config.depth)
    return tuple(dict.fromkeys((DEFAULT_ROW_CONFIG, *largest_last)))


class _Rows:
    """Logits, and their gradient by the default tile."""

    def __init__(self, notes: Notes, rows: int, columns: int) -> None:
        generator = torch.Generator(notes.device).manual_seed(0)
        self.columns = columns
        self.source = torch.empty(rows, columns, device=notes.device)
        self.source.normal_(std=2.0, generator=generator)
        self.target = torch.randint(columns, (rows,), generator=generator, device=notes.device)
        tile = Tile(self.source.clone(), self.target, Transform())
        self._logits = tile.logits
        self._kernels = {
            kernel: run_of(kernel, tile, torch.bfloat16) for kernel in ("dlogits", "loss")
        }
        self.expected = self.run("dlogits", DEFAULT_ROW_CONFIG)["the gradient"].clone()

    def run(self, kernel: str, config: RowConfig) -> dict[str, Tensor]:
        """Run a kernel on fresh logits."""
        self._logits.copy_(self.source)
        return self._kernels[kernel](config)

    def exact(self) -> Tensor:
        """Return the gradient in torch, of a log-probability with a gradient of 1."""
        exact = self.source.log_softmax(-1).exp_().neg_()
        rows = torch.arange(len(exact), device=exact.device)
        exact[rows, self.target] = -torch.expm1(
            torch.log_softmax(self.source, -1)[rows, self.target]
        )
        return exact


def _tiled(notes: Notes, tiles: dict[int, _Rows], config: RowConfig) -> None:
    for columns, rows in tiles.items():
        name = f"dlogits V {columns}, {config.num_warps} warps x {config.depth}"
        for _ in range(2):
            notes.check_equal(name, rows.expected, rows.run("dlogits", config)["the gradient"])
        if config == DEFAULT_ROW_CONFIG:
            exact = rows.exact()
            errors = (rows.expected.float() - exact).abs() / exact.abs().clamp(min=1e-12)
            error, allowed = errors.max().item(), 1.1 * torch.finfo(torch.bfloat16).eps
            ok = error <= allowed
            notes.check(f"{name}, torch", ok, f"errors up to {allowed:.1e}", f"{error:.1e}")


def _repeated(
    notes: Notes, rows: _Rows, config: RowConfig, repeats: int, hammer: Callable[[], None]
) -> None:
    """Run the fused loss many times while another stream keeps the memory busy."""
    first = {name: x.clone() for name, x in rows.run("loss", config).items()}
    differing = torch.zeros((), dtype=torch.int64, device=notes.device)
    for _ in range(repeats):
        hammer()
        for name, value in rows.run("loss", config).items():
            differing += (bits_of(first[name]) != bits_of(value)).sum()
    name = f"loss V {rows.columns}, {config.num_warps} warps x {config.depth}, {repeats} times"
    came = int(differing)
    notes.check(name, came == 0, "the same bits", f"{came} values that differ")


def _hammer(device: torch.device) -> Callable[[], None]:
    """Return what keeps another stream copying for about a millisecond; on a CPU it does not."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.Stream(device)
    busy = torch.empty(2, _HAMMER_BYTES // 2, dtype=torch.int8, device=device)

    def hammer() -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                busy[0].copy_(busy[1])

    return hammer
