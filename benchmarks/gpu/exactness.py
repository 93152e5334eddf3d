"""Bits of GEMMs that the design relies on, and that a row's bits depend on that row alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.notes import Notes
from grpo_kernels.backends.base import output_view
from grpo_kernels.backends.triton import linear_stats
from grpo_kernels.head import Head, accumulate, clear_row_ends, matmul_precision, project


@dataclass(frozen=True)
class _Sizes:
    """Shapes of the GEMMs."""

    rows: tuple[int, ...]  # C of canaries
    hidden: tuple[int, ...]  # D
    vocabularies: tuple[int, ...]  # V, some odd
    strided: tuple[tuple[int, int, int], ...]  # (C, V, D)
    batch: int  # rows of the fused forward
    fixed_rows: int  # of the batch-invariant tile
    heads: tuple[tuple[int, int], ...]  # (V, D) of bits


_SIZES = {
    False: _Sizes(
        rows=(1, 7, 64, 200, 1000, 4096),
        hidden=(896, 2049),
        vocabularies=(151936, 151665, 50257, 16384, 4480),
        strided=((4096, 151936, 2048), (1000, 151936, 896), (7, 50264, 2048), (4096, 50257, 896)),
        batch=8192,
        fixed_rows=1024,
        heads=((151936, 2048), (32000, 896), (1000, 512)),
    ),
    True: _Sizes(
        rows=(1, 7, 33),
        hidden=(17, 32),
        vocabularies=(53, 257),
        strided=((7, 53, 32), (33, 256, 16)),
        batch=24,
        fixed_rows=32,
        heads=((53, 32), (257, 16)),
    ),
}
_HALF = (torch.bfloat16, torch.float16)


def canaries(notes: Notes, small: bool) -> None:
    """Multiply ones, whose sum is K exactly, and the narrowed rows of an fp32 tile."""
    sizes = _SIZES[small]
    with matmul_precision(notes.device, "fp32"):
        notes.every(
            (f"strided {shape}", partial(_strided, notes, *shape)) for shape in sizes.strided
        )
        notes.every(
            (f"ones C {rows} V {columns} D {depth}", partial(_ones, notes, rows, columns, depth))
            for columns in sizes.vocabularies
            for depth in sizes.hidden
            for rows in sizes.rows
        )


def _ones(notes: Notes, rows: int, columns: int, depth: int) -> None:
    """Check every GEMM of a step: a kernel that drops a part of K shows as a smaller number."""

    def ones(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=notes.device)

    def wide(*shape: int, value: float = float("nan")) -> Tensor:
        return torch.full(shape, value, dtype=torch.float32, device=notes.device)

    shape = f"C {rows} V {columns} D {depth}"
    for dtype in (*_HALF, torch.float32):
        hidden, weight, dlogits = ones(rows, depth), ones(columns, depth), ones(rows, columns)
        forms = {
            "logits": (depth, project(hidden, Head(weight), wide(rows, columns))),
            "dhidden": (columns, _sum(wide(rows, depth), dlogits, weight)),
            "dweight": (rows, _sum(wide(columns, depth), dlogits.t(), hidden)),
            "dweight, added": (
                rows + 3,
                _sum(wide(columns, depth, value=3.0), dlogits.t(), hidden, first=False),
            ),
            "dweight, added half": (
                rows / 2 + 3,
                _sum(wide(columns, depth, value=3.0), dlogits.t(), hidden, False, alpha=0.5),
            ),
        }
        if dtype != torch.float32:
            narrow = torch.empty(rows, columns, dtype=dtype, device=notes.device)
            forms["logits of 16 bits"] = (depth, project(hidden, Head(weight), narrow))
            narrow = torch.empty(columns, depth, dtype=dtype, device=notes.device)
            forms["dweight of 16 bits"] = (rows, _sum(narrow, dlogits.t(), hidden))
            narrow = torch.empty(rows, depth, dtype=dtype, device=notes.device)
            forms["dhidden of 16 bits"] = (columns, torch.mm(dlogits, weight, out=narrow))
        for form, (sum_, came) in forms.items():
            expected = torch.tensor(sum_).to(came.dtype).item()
            least, most = (float(x) for x in came.aminmax())
            ok = least == most == expected
            notes.check(f"{form}, {dtype}, {shape}", ok, f"{expected}", f"{least} to {most}")


def _sum(out: Tensor, a: Tensor, b: Tensor, first: bool = True, alpha: float = 1.0) -> Tensor:
    accumulate(out, a, b, first, alpha)
    return out


def _strided(notes: Notes, rows: int, columns: int, depth: int) -> None:
    """Multiply a tile narrowed in place, each row in the first half of its bytes, and a copy."""
    generator = torch.Generator(notes.device).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device=notes.device)
        return x.normal_(generator=generator)

    for dtype in _HALF:
        tile = torch.full((rows, columns), float("nan"), device=notes.device)
        narrowed = output_view(tile, dtype)
        narrowed.copy_(normal(rows, columns, dtype=dtype))
        clear_row_ends(narrowed)
        copy = narrowed.contiguous()
        hidden, weight = normal(rows, depth, dtype=dtype), normal(columns, depth, dtype=dtype)
        wide = partial(torch.empty, device=notes.device, dtype=torch.float32)
        for name, rows_out, turned, factor in (
            ("dhidden", rows, False, weight),
            ("dweight", columns, True, hidden),
        ):
            expected, came = (
                _sum(wide(rows_out, depth), x.t() if turned else x, factor)
                for x in (copy, narrowed)
            )
            what = f"{name} of a strided {dtype} tile, C {rows} V {columns} D {depth}"
            notes.check_equal(what, expected, came)


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
