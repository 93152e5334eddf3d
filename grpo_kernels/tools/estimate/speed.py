"""How fast a device multiplies and copies: from data sheets, or measured in a second."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.head.head import accumulate
from grpo_kernels.linear_logprobs import linear_logprobs

# What large products and copies reach of the data sheet's numbers.
MATRIX_EFFICIENCY = 0.7
BANDWIDTH_EFFICIENCY = 0.8

# Starting the dozen kernels of a chunk, and the few hundred of a loss; a guess.
_GPU_PIECE, _GPU_CALL = 50e-6, 1e-3
_SECONDS = 0.25  # of each of the measurements
_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A data sheet: dense products with fp32 accumulation, without sparsity, without TF32."""

    name: str
    pattern: str  # of what the driver or a user calls it
    tflops: float  # 16 bits
    tflops_fp32: float
    bandwidth: float  # GB/s


# the first pattern that is found decides
GPUS = (
    Gpu(name="H100 PCIe", pattern=r"h100.*pcie", tflops=756, tflops_fp32=51, bandwidth=2000),
    Gpu(name="H100 NVL", pattern=r"h100.*nvl", tflops=835, tflops_fp32=60, bandwidth=3900),
    Gpu(name="H100 SXM", pattern=r"h100", tflops=989, tflops_fp32=67, bandwidth=3350),
    Gpu(name="H200", pattern=r"h200", tflops=989, tflops_fp32=67, bandwidth=4800),
    Gpu(name="B200", pattern=r"b200", tflops=2250, tflops_fp32=75, bandwidth=7700),
    Gpu(name="A100 40GB", pattern=r"a100.*40", tflops=312, tflops_fp32=19.5, bandwidth=1555),
    Gpu(name="A100 80GB", pattern=r"a100", tflops=312, tflops_fp32=19.5, bandwidth=2039),
    Gpu(name="L40S", pattern=r"l40s", tflops=362, tflops_fp32=91.6, bandwidth=864),
    Gpu(name="L4", pattern=r"\bl4\b", tflops=121, tflops_fp32=30.3, bandwidth=300),
    Gpu(name="A10", pattern=r"\ba10g?\b", tflops=125, tflops_fp32=31.2, bandwidth=600),
    Gpu(name="RTX 5090", pattern=r"5090", tflops=209.5, tflops_fp32=104.8, bandwidth=1792),
    Gpu(name="RTX 4090", pattern=r"4090", tflops=165.2, tflops_fp32=82.6, bandwidth=1008),
    Gpu(name="RTX 3090", pattern=r"3090", tflops=71, tflops_fp32=35.6, bandwidth=936),
    Gpu(name="MI300X", pattern=r"mi300x", tflops=1307, tflops_fp32=163.4, bandwidth=5300),
)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Achieved rates, and where they are from.

    Operations and bytes per second, reads plus writes. What is not known is taken to be like a
    plain product, or a plain pass.
    """

    matrix: float  # products in the dtype of the hidden states
    wide_matrix: float  # in fp32
    bandwidth: float  # passes over the logits, and the weight of a product
    where: str  # the device
    source: str
    sums: float | None = None  # products of 16-bit factors that leave their fp32 sums
    fused: float | None = None  # the product that takes its statistics along
    adding: float | None = None  # fp32 sums in memory that a product adds to
    piece: float = 0.0  # seconds that a chunk of rows or a slice of the vocabulary costs besides
    call: float = 0.0  # seconds that a loss costs besides

    def rate(self, name: str) -> float:
        """Of a field that is one."""
        found = getattr(self, name)
        return getattr(self, _LIKE[name]) if found is None else found


_LIKE = {"sums": "matrix", "fused": "matrix", "adding": "bandwidth"}


def find_gpu(name: str) -> Gpu | None:
    """The data sheet for a device's name; None when it is not in the table."""
    plain = re.sub(r"[^a-z0-9]+", " ", name.lower())
    return next((gpu for gpu in GPUS if re.search(gpu.pattern, plain)), None)


def datasheet(gpu: Gpu, dtype: torch.dtype) -> Speed:
    """The rates to expect of ``gpu``."""
    short = dtype.itemsize < 4
    peak = gpu.tflops if short else gpu.tflops_fp32
    return Speed(
        matrix=peak * 1e12 * MATRIX_EFFICIENCY,
        wide_matrix=gpu.tflops_fp32 * 1e12 * MATRIX_EFFICIENCY,
        bandwidth=gpu.bandwidth * 1e9 * BANDWIDTH_EFFICIENCY,
        piece=_GPU_PIECE,
        call=_GPU_CALL,
        where=gpu.name,
        source=(
            f"data sheet of {gpu.name}: {MATRIX_EFFICIENCY:.0%} of its {peak:g} TFLOP/s "
            f"({'16 bits' if short else 'fp32'}, dense) and "
            f"{BANDWIDTH_EFFICIENCY:.0%} of its {gpu.bandwidth:g} GB/s"
        ),
    )


def measured(device: torch.device, dtype: torch.dtype, hidden: int) -> Speed:
    """The rates of this machine: products of (rows, hidden) states, and a copy."""
    matrix = _product_rate(device, dtype, hidden, _plain)
    narrow = dtype != torch.float32
    wide = _product_rate(device, torch.float32, hidden, _plain) if narrow else matrix
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    copies = _rate(device, lambda: target.copy_(source))
    return Speed(
        matrix=matrix,
        wide_matrix=wide,
        bandwidth=copies * 2 * _COPIED_BYTES,
        sums=_product_rate(device, dtype, hidden, _summed) if narrow else matrix,
        fused=_product_rate(device, dtype, hidden, _with_statistics),
        where=f"this {'GPU' if device.type == 'cuda' else 'CPU'}",
        source="products and a copy that were timed just now",
    )


def _plain(x: Tensor, weight: Tensor) -> Callable[[], object]:
    out = x.new_empty(x.shape[0], weight.shape[0])
    return lambda: torch.mm(x, weight.t(), out=out)


def _summed(x: Tensor, weight: Tensor) -> Callable[[], object]:
    out = x.new_zeros(x.shape[0], weight.shape[0], dtype=torch.float32)
    return lambda: accumulate(out, x, weight.t(), first=True)


def _with_statistics(x: Tensor, weight: Tensor) -> Callable[[], object]:
    target = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device)
    return lambda: linear_logprobs(x, weight, target)


def _product_rate(
    device: torch.device,
    dtype: torch.dtype,
    hidden: int,
    make: Callable[[Tensor, Tensor], Callable[[], object]],
) -> float:
    rows, columns = (512, 4096) if device.type == "cpu" else (4096, 32768)
    x = torch.randn(rows, hidden, device=device).to(dtype)
    weight = torch.randn(columns, hidden, device=device).to(dtype)
    return _rate(device, make(x, weight)) * 2.0 * rows * columns * hidden


def _rate(device: torch.device, call: Callable[[], object]) -> float:
    """Calls per second."""

    def finish() -> None:
        if device.type != "cpu":
            torch.cuda.synchronize(device)

    call()
    finish()
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < _SECONDS or count < 2:
        call()
        finish()
        count += 1
    return count / elapsed
