"""GEMMs of a step whose results are known to the bit: one that goes wrong silently shows here.

A library that drops a part of K sums fewer ones than K. One that reads beyond a strided row gives
other bits than for a copy without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from grpo_kernels.backends import output_view
from grpo_kernels.head import (
    Head,
    accumulate,
    leading_dim,
    matmul_precision,
    project,
    stats_dtype,
    zero_row_padding,
)


@dataclass(frozen=True)
class Shape:
    """A tile of logits and its GEMMs."""

    rows: int  # C, the K of dweight
    columns: int  # V, the K of dhidden
    depth: int  # D, the K of the logits

    def __str__(self) -> str:
        return f"C {self.rows} V {self.columns} D {self.depth}"


@dataclass(frozen=True)
class Canary:
    """One GEMM, and whether its result is the expected one."""

    gemm: str
    ok: bool
    expected: str
    came: str


def gemm_canaries(device: torch.device, dtype: torch.dtype, shape: Shape) -> Iterator[Canary]:
    """Yield what comes of every GEMM of a step for inputs of ``dtype``."""
    yield from _sums_of_ones(device, dtype, shape)
    if dtype.itemsize < stats_dtype(dtype).itemsize:
        yield from _narrowed_tiles(device, dtype, shape)


def _sums_of_ones(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Canary]:
    """Multiply ones in every GEMM of a step: each sum is K exactly, as far as dtypes hold it."""
    rows, columns, depth = shape.rows, shape.columns, shape.depth
    wide = stats_dtype(dtype)

    def new(*size: int, of: torch.dtype = wide, value: float = float("nan")) -> Tensor:
        return torch.full(size, value, dtype=of, device=device)

    ones, three = partial(new, of=dtype, value=1.0), partial(new, columns, depth, value=3.0)
    hidden, weight = ones(rows, depth), ones(columns, depth)
    dlogits = _narrowed(_tile(shape, wide, device), ones(rows, columns))
    head, tile = Head(weight), partial(_tile, shape, device=device)
    with matmul_precision(device, "fp32"):
        found = [
            _all_equal("logits", depth, project(hidden, head, tile(wide))),
            _all_equal("dhidden", columns, _sum(new(rows, depth), dlogits, weight)),
            _all_equal("dweight", rows, _sum(new(columns, depth), dlogits.t(), hidden)),
            _all_equal("dweight, added", rows + 3, _sum(three(), dlogits.t(), hidden, False)),
            _all_equal(
                "dweight, added half", rows / 2 + 3, _sum(three(), dlogits.t(), hidden, False, 0.5)
            ),
        ]
        if dtype == wide:
            return found
        dhidden, dweight = new(rows, depth, of=dtype), new(columns, depth, of=dtype)
        return [
            *found,
            _all_equal("logits of 16 bits", depth, project(hidden, head, tile(dtype))),
            _all_equal("dhidden of 16 bits", columns, torch.mm(dlogits, weight, out=dhidden)),
            _all_equal("dweight of 16 bits", rows, _sum(dweight, dlogits.t(), hidden)),
        ]


def _tile(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tile of NaNs whose rows start where those of a step's tile do."""
    size = shape.rows, leading_dim(shape.columns, dtype, device)
    return torch.full(size, float("nan"), dtype=dtype, device=device)[:, : shape.columns]


def _narrowed(tile: Tensor, values: Tensor) -> Tensor:
    """Write values of 16 bits over a tile as its gradient: in the first half of each row."""
    narrow = output_view(tile, values.dtype)
    narrow.copy_(values)
    zero_row_padding(narrow)
    return narrow


def _sum(out: Tensor, a: Tensor, b: Tensor, first: bool = True, alpha: float = 1.0) -> Tensor:
    accumulate(out, a, b, first, alpha)
    return out


def _all_equal(gemm: str, number: float, came: Tensor) -> Canary:
    expected = torch.tensor(number).to(came.dtype).item()
    least, most = (float(x) for x in came.aminmax())
    return Canary(gemm, least == most == expected, f"{expected}", f"{least} to {most}")


def _narrowed_tiles(device: torch.device, dtype: torch.dtype, shape: Shape) -> list[Canary]:
    """Multiply a gradient of 16 bits in the place of its fp32 logits, and a copy of it."""
    rows, columns, depth = shape.rows, shape.columns, shape.depth
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    tile = _narrowed(_tile(shape, torch.float32, device), normal(rows, columns))
    # its rows start aligned as those of the tile: for others a library may take another kernel
    copy = _tile(shape, dtype, device).copy_(tile)
    hidden, weight = normal(rows, depth), normal(columns, depth)
    wide = partial(torch.empty, device=device, dtype=torch.float32)
    with matmul_precision(device, "fp32"):
        return [
            _same("dhidden", *(_sum(wide(rows, depth), x, weight) for x in (copy, tile))),
            _same("dweight", *(_sum(wide(columns, depth), x.t(), hidden) for x in (copy, tile))),
        ]


def _same(gemm: str, expected: Tensor, came: Tensor) -> Canary:
    differ = int((expected != came).sum())  # NaNs, too: there should be none
    said = f"{differ} of {came.numel()} that differ" if differ else "these"
    return Canary(f"{gemm} of a narrowed tile", not differ, "the bits of a copy", said)
