"""Bits that the design relies on, at the sizes of real heads; on a CPU at tiny ones.

GEMMs of a step, the bits of a row alone and among others, and kernels that write a gradient over
the logits that they read: a race shows as bits that change from run to run, or with the tile.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels import available_backends
from grpo_kernels.backends import RowStats, StatsGrad, Tile, output_view
from grpo_kernels.backends.gpu_tiles import ROW_CONFIG, RowConfig
from grpo_kernels.backends.triton import dlogits_, linear_stats, logp_gradient_, row_stats
from grpo_kernels.head import Head, Transform, matmul_precision, project
from grpo_kernels.tools.check import wrong_gemms

pytestmark = pytest.mark.skipif(
    "triton" not in available_backends(), reason="the interpreter is off"
)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# (C, V, D); on a GPU the real ones
SHAPES = {
    "cpu": [(c, v, d) for v, d in ((53, 17), (257, 32)) for c in (1, 7, 33)],
    "cuda": [
        (4096, 151936, 2048),
        (7, 50264, 2048),
        *((c, v, d) for v in (151936, 151665, 50257, 4480) for d in (896, 2049) for c in (7, 1000)),
    ],
}
HEADS = {"cpu": [(53, 32), (257, 16)], "cuda": [(151936, 2048), (32000, 896), (1000, 512)]}
VOCABULARIES = {"cpu": (257, 53, 1), "cuda": (151936, 50257, 2049, 2048, 2047, 53, 1)}
CONFIGS = {
    "cpu": (ROW_CONFIG, RowConfig(1, 1)),
    "cuda": (
        *(ROW_CONFIG, RowConfig(8, 2), RowConfig(32, 1), RowConfig(1, 8), RowConfig(16, 4)),
        *(RowConfig(2, 1), RowConfig(4, 1), RowConfig(8, 8)),
    ),
}
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """Return the bits as integers, which are equal where NaNs are."""
    return x.contiguous().view(_INTEGERS[x.element_size()])


def inputs(
    device: torch.device, rows: int, columns: int, depth: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    hidden = torch.empty(rows, depth, dtype=dtype, device=device).normal_()
    return hidden, torch.empty(columns, depth, dtype=dtype, device=device).normal_(0, depth**-0.5)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_gemms_lose_no_part_of_k(device: torch.device, dtype: torch.dtype) -> None:
    for shape in SHAPES[device.type]:
        assert list(wrong_gemms(device, dtype, shape)) == []


def test_a_row_of_the_fused_forward_keeps_its_bits(device: torch.device) -> None:
    """Alone, among others and at other places."""
    count = 24 if device.type == "cpu" else 8192
    for columns, depth in HEADS[device.type]:
        hidden, weight = inputs(device, count, columns, depth, BF16)
        target = torch.arange(count, device=device) % columns

        def run(index: slice | Tensor) -> RowStats:
            return linear_stats(hidden[index], Head(weight), target[index], "fp32", False)  # noqa: B023

        whole = run(slice(None))
        parts: list[slice | Tensor] = [slice(None), slice(7, 12)]
        parts += [slice(row, row + 1) for row in (0, 3, count // 2 + 1, count - 1)]
        parts += [torch.arange(count, device=device).roll(n) for n in (1, count // 3)]
        for part in parts:
            for expected, came in zip(whole.rows(part)[:3], run(part)[:3], strict=True):
                assert torch.equal(bits(expected), bits(came)), (columns, depth, part)


def test_extra_statistics_change_no_bits_of_the_others(device: torch.device) -> None:
    """On a GPU where a tile and its half lie on threads alike."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("columns of a row lie on several warps")
    for columns, depth in HEADS[device.type]:
        hidden, weight = inputs(device, 24, columns, depth, BF16)
        target = torch.arange(24, device=device) % columns
        lean, full = (linear_stats(hidden, Head(weight), target, "fp32", x) for x in (False, True))
        for expected, came in zip(full[:3], lean[:3], strict=True):
            assert torch.equal(bits(expected), bits(came)), (columns, depth)


@pytest.mark.parametrize("dtype,logits", [(BF16, FP32), (BF16, BF16), (FP32, FP32)])
def test_a_row_keeps_its_bits_in_a_tile_of_fixed_height(
    device: torch.device, dtype: torch.dtype, logits: torch.dtype
) -> None:
    rows = 32 if device.type == "cpu" else 1024
    for columns, depth in HEADS[device.type]:
        hidden, weight = inputs(device, rows, columns, depth, dtype)

        def run(x: Tensor) -> Tensor:
            out = torch.empty(rows, columns, dtype=logits, device=device)  # noqa: B023
            return bits(project(x, Head(weight), out))  # noqa: B023

        with matmul_precision(device, "fp32"):
            alone, amid = run(hidden[:1].expand(rows, depth).contiguous()), run(hidden)
            assert torch.equal(alone, alone[:1].expand_as(alone))
            assert torch.equal(amid[0], alone[0]) and torch.equal(amid, run(hidden))
            shift = rows // 2 - 1
            assert torch.equal(amid.roll(shift, 0), run(hidden.roll(shift, 0)))


def rows_of(device: torch.device, columns: int) -> Tile:
    count = 2 if device.type == "cpu" else 528
    logits = torch.empty(count, columns, device=device).normal_(std=2.0)
    return Tile(logits, torch.randint(columns, (count,), device=device), Transform())


def test_no_kernel_races_with_itself(device: torch.device) -> None:
    """The gradient of each tile is the same, and each time."""
    for columns in VOCABULARIES[device.type]:
        tile = rows_of(device, columns)
        stats, one = row_stats(tile, False), torch.ones(len(tile.target), device=device)

        def dlogits(config: RowConfig) -> Tensor:
            own = tile._replace(logits=tile.logits.clone())  # noqa: B023
            grad_stats = StatsGrad(one)  # noqa: B023
            return bits(dlogits_(own, stats, grad_stats, output_view(own.logits, BF16), config))  # noqa: B023

        expected = dlogits(ROW_CONFIG)
        for config in CONFIGS[device.type]:
            for _ in range(2):
                assert torch.equal(expected, dlogits(config)), (columns, config)


def test_one_read_races_with_nothing(device: torch.device) -> None:
    """While another stream keeps the memory busy."""
    repeats, hammer = (3 if device.type == "cpu" else 20), busy_stream(device)
    for columns in VOCABULARIES[device.type][:3]:
        tile = rows_of(device, columns)
        for config in CONFIGS[device.type]:
            first: list[Tensor] = []
            for _ in range(repeats):
                hammer()
                own = tile._replace(logits=tile.logits.clone())
                stats, gradient = logp_gradient_(own, config)
                assert gradient.row_scale is not None
                found = [bits(x) for x in (stats.logprobs, gradient.dlogits, gradient.row_scale)]
                first = first or found
                assert all(map(torch.equal, first, found)), (columns, config)


def busy_stream(device: torch.device) -> Callable[[], None]:
    """Return what keeps another stream copying for about a millisecond; on a CPU it does not."""
    if device.type != "cuda":
        return lambda: None
    stream = torch.cuda.Stream(device)
    busy = torch.empty(2, 1 << 29, dtype=torch.int8, device=device)

    def hammer() -> None:
        with torch.cuda.stream(stream):
            for _ in range(4):
                busy[0].copy_(busy[1])

    return hammer
