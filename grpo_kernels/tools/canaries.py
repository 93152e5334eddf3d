"""GEMMs of a step whose results are known to the bit: one that goes wrong silently shows here.

A library that drops a part of K sums fewer ones than K. One that reads beyond a strided row gives
other bits than for a copy without a gap.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def wrong_gemms(
    device: torch.device,
    dtype: torch.dtype,  # of the inputs
    rows: int,  # C, the K of dweight
    columns: int,  # V, the K of dhidden
    depth: int,  # D, the K of the logits
) -> Iterator[str]:
    """Say of every GEMM of a step, for a tile of logits, whose result is not the expected one."""
    shape = f"C {rows} V {columns} D {depth}"
    with matmul_precision(device, "fp32"):
        for gemm, number, came in _sums_of_ones(device, dtype, rows, columns, depth):
            expected = torch.tensor(number).to(came.dtype).item()
            least, most = (float(x) for x in came.aminmax())
            if not least == most == expected:
                yield f"{gemm}, {shape}: expected {expected}, got {least} to {most}"
        if dtype == stats_dtype(dtype):
            return
        for gemm, copy, came in _narrowed_tiles(device, dtype, rows, columns, depth):
            differ = int((copy != came).sum())  # NaNs, too: there should be none
            if differ:
                got = f"{differ} of {came.numel()} that differ"
                yield f"{gemm} of a narrowed tile, {shape}: expected the bits of a copy, got {got}"


def _sums_of_ones(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, depth: int
) -> Iterator[tuple[str, float, Tensor]]:
    """Multiply ones in every GEMM of a step: each sum is K exactly, as far as dtypes hold it."""
    wide = stats_dtype(dtype)

    def new(*size: int, of: torch.dtype = wide, value: float = float("nan")) -> Tensor:
        return torch.full(size, value, dtype=of, device=device)

    def dweight(out: Tensor, first: bool = True, alpha: float = 1.0) -> Tensor:
        return _sum(out, dlogits.t(), hidden, first, alpha)

    ones, three = partial(new, of=dtype, value=1.0), partial(new, columns, depth, value=3.0)
    hidden, weight = ones(rows, depth), ones(columns, depth)
    tile = partial(_tile, device, rows, columns)
    dlogits, head = _narrowed(tile(wide), ones(rows, columns)), Head(weight)
    yield "logits", depth, project(hidden, head, tile(wide))
    yield "dhidden", columns, _sum(new(rows, depth), dlogits, weight)
    yield "dweight", rows, dweight(new(columns, depth))
    yield "dweight, added", rows + 3, dweight(three(), False)
    yield "dweight, added half", rows / 2 + 3, dweight(three(), False, 0.5)
    if dtype != wide:
        dhidden = torch.mm(dlogits, weight, out=new(rows, depth, of=dtype))
        yield "logits of 16 bits", depth, project(hidden, head, tile(dtype))
        yield "dhidden of 16 bits", columns, dhidden
        yield "dweight of 16 bits", rows, dweight(new(columns, depth, of=dtype))


def _narrowed_tiles(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, depth: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Multiply a gradient of 16 bits in the place of its fp32 logits, and a copy of it."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    tile = _narrowed(_tile(device, rows, columns, torch.float32), normal(rows, columns))
    # its rows start aligned as those of the tile: for others a library may take another kernel
    copy = _tile(device, rows, columns, dtype).copy_(tile)
    hidden, weight = normal(rows, depth), normal(columns, depth)
    wide = partial(torch.empty, device=device, dtype=torch.float32)
    for gemm, size, a, b, other in (
        ("dhidden", rows, copy, tile, weight),
        ("dweight", columns, copy.t(), tile.t(), hidden),
    ):
        yield gemm, _sum(wide(size, depth), a, other), _sum(wide(size, depth), b, other)


def _tile(device: torch.device, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return a tile of NaNs whose rows start where those of a step's tile do."""
    size = rows, leading_dim(columns, dtype, device)
    return torch.full(size, float("nan"), dtype=dtype, device=device)[:, :columns]


def _narrowed(tile: Tensor, values: Tensor) -> Tensor:
    """Write values of 16 bits over a tile as its gradient: in the first half of each row."""
    narrow = output_view(tile, values.dtype)
    narrow.copy_(values)
    zero_row_padding(narrow)
    return narrow


def _sum(out: Tensor, a: Tensor, b: Tensor, first: bool = True, alpha: float = 1.0) -> Tensor:
    accumulate(out, a, b, first, alpha)
    return out
