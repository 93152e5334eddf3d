"""Bits of GEMMs that the design relies on, and that a row's bits depend on that row alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.notes import Notes
from grpo_kernels.backends.triton import linear_stats
from grpo_kernels.head import Head, matmul_precision, project
from grpo_kernels.tools.canaries import Shape, gemm_canaries


@dataclass(frozen=True)
class _Sizes:
    """Shapes of the GEMMs."""

    rows: tuple[int, ...]  # C of canaries
    hidden: tuple[int, ...]  # D
    vocabularies: tuple[int, ...]  # V, some odd
    chunks: tuple[tuple[int, int, int], ...]  # (C, V, D) of more canaries
    batch: int  # rows of the fused forward
    fixed_rows: int  # of the batch-invariant tile
    heads: tuple[tuple[int, int], ...]  # (V, D) of bits


_SIZES = {
    False: _Sizes(
        rows=(1, 7, 64, 200, 1000, 4096),
        hidden=(896, 2049),
        vocabularies=(151936, 151665, 50257, 16384, 4480),
        chunks=((4096, 151936, 2048), (7, 50264, 2048)),
        batch=8192,
        fixed_rows=1024,
        heads=((151936, 2048), (32000, 896), (1000, 512)),
    ),
    True: _Sizes(
        rows=(1, 7, 33),
        hidden=(17, 32),
        vocabularies=(53, 257),
        chunks=((33, 256, 16),),
        batch=24,
        fixed_rows=32,
        heads=((53, 32), (257, 16)),
    ),
}
_HALF = (torch.bfloat16, torch.float16)


def canaries(notes: Notes, small: bool) -> None:
    """Check every GEMM of a step by its canaries."""
    sizes = _SIZES[small]
    tiles = [
        *sizes.chunks,
        *((c, v, d) for v in sizes.vocabularies for d in sizes.hidden for c in sizes.rows),
    ]
    notes.every(
        (f"{dtype}, {shape}", partial(_canaries, notes, dtype, shape))
        for shape in (Shape(*tile) for tile in tiles)
        for dtype in (*_HALF, torch.float32)
    )


def _canaries(notes: Notes, dtype: torch.dtype, shape: Shape) -> None:
    for found in gemm_canaries(notes.device, dtype, shape):
        notes.check(f"{found.gemm}, {dtype}, {shape}", found.ok, found.expected, found.came)


def bits(notes: Notes, small: bool) -> None:
    """Compare a row's bits alone, in other batches and at other places."""
    sizes = _SIZES[small]
    cases = []
    for columns, depth in sizes.heads:
        name = f"V {columns} D {depth}"
        run = partial(_fused_rows, notes, sizes.batch, columns, depth)
        cases.append((f"fused forward, {name}", run))
        for dtype, logits in (
            (torch.bfloat16, torch.float32),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
        ):
            run = partial(_places, notes, sizes.fixed_rows, columns, depth, dtype, logits)
            cases.append((f"fixed tile, {name}, {dtype}", run))
    notes.every(cases)


def _inputs(
    notes: Notes, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(notes.device).manual_seed(0)
    hidden = torch.empty(rows, depth, dtype=dtype, device=notes.device)
    weight = torch.empty(columns, depth, dtype=dtype, device=notes.device)
    return hidden.normal_(generator=generator), weight.normal_(0, depth**-0.5, generator=generator)


def _fused_rows(notes: Notes, rows: int, columns: int, depth: int) -> None:
    hidden, weight = _inputs(notes, rows, columns, depth, torch.bfloat16)
    target = torch.arange(rows, device=notes.device) % columns
    head = Head(weight)

    def run(index: slice | Tensor) -> Tensor:
        found = linear_stats(hidden[index], head, target[index], "fp32", False)
        return torch.stack([found.logp.double(), found.entropy.double(), found.lse])

    everything = slice(None)
    whole, name = run(everything), f"V {columns} D {depth} bf16"
    notes.check_equal(f"fused forward again, {name}", whole, run(everything))
    for shift in (1, rows // 3):
        moved = torch.arange(rows, device=notes.device).roll(shift)
        notes.check_equal(f"rows moved by {shift}, {name}", whole[:, moved], run(moved))
    for row in (0, 3, rows // 2 + 1, rows - 1):
        alone, five = slice(row, row + 1), slice(max(0, row - 4), max(0, row - 4) + 5)
        notes.check_equal(f"row {row} alone, {name}", whole[:, alone], run(alone))
        notes.check_equal(f"row {row} in five, {name}", whole[:, five], run(five))


def _places(
    notes: Notes, rows: int, columns: int, depth: int, dtype: torch.dtype, logits: torch.dtype
) -> None:
    """Multiply a tile of one row, again and again; and that row amid others."""
    hidden, weight = _inputs(notes, rows, columns, depth, dtype)
    head, shape = Head(weight), (rows, columns)
    name = f"V {columns} D {depth} {dtype} to {logits}"

    def run(x: Tensor) -> Tensor:
        return project(x, head, torch.empty(shape, dtype=logits, device=notes.device))

    with matmul_precision(notes.device, "fp32"):
        first = run(hidden[:1].expand(rows, depth).contiguous())
        expected = first[:1].expand(shape)
        notes.check_equal(f"one row in {rows} places, {name}", expected, first)
        amid = run(hidden)
        notes.check_equal(f"a tile again, {name}", amid, run(hidden))
        notes.check_equal(f"a row amid others, {name}", first[:1], amid[:1])
        shift = rows // 2 - 1
        turned = run(hidden.roll(shift, 0))
        notes.check_equal(f"rows moved, {name}", amid.roll(shift, 0), turned)
