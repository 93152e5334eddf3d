"""Each GEMM of a step in every form, and a copy; for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt, race
from benchmarks.results import Row
from benchmarks.shapes import Shape
from benchmarks.timing import make_timer
from grpo_kernels.backends import output_view
from grpo_kernels.head import Head, accumulate, matmul_precision, project

_BF16 = torch.bfloat16
_COLUMNS, _ODD, _PADDED = 151936, 151665, 151680
NOTES = {
    "logits bf16": "the yardstick of the other rows",
    "logits fp32": "16-bit operands, fp32 results",
    "dhidden": "a tile without gaps",
    "dhidden fp32": "a sum of one chunk",
    "dhidden, softmax": "as dhidden, with values like a softmax: random bits make GEMMs slower",
    "dhidden, strided": "the first half of each row of an fp32 tile",
    "dweight": "as dhidden",
    "dweight, softmax": "as dhidden, softmax",
    "dweight, strided": "as dhidden, strided",
    "dweight fp32": "a sum of one chunk",
    "dweight fp32, added": "added to the sum of earlier chunks",
    "copy": "of the weight",
    "scale": "an fp32 gradient of the weight to bf16",
}


def _tile(rows: int, columns: int, depth: int, pitch: int) -> Shape:
    """Return a case: logits (C, V) of depth D, with rows ``pitch`` elements apart."""
    facts = {"model": f"rows of {pitch} elements", "tokens": rows, "hidden": depth}
    facts |= {"vocabulary": columns, "dtype": "bf16"}
    return Shape(f"C={rows}, V={columns}, D={depth}, pitch={pitch}", facts, {"pitch": pitch})


# heights of a chunk; an odd number, and the next multiple of 256
_BY_ROWS = [
    _tile(rows, _COLUMNS, depth, _COLUMNS)
    for depth in (2048, 4096)
    for rows in (1280, 2048, 4096, 6553, 6656, 8192)
]
_GPU = [
    *_BY_ROWS,
    *(_tile(8192, _ODD, 2048, pitch) for pitch in (_ODD, _PADDED)),
    *(_tile(rows, _COLUMNS, 896, _COLUMNS) for rows in (4096, 8192)),
]
CASES = {
    "tiny": [_tile(16, 257, 32, 272)],
    "cpu": [_tile(1024, _COLUMNS, 896, _COLUMNS)],
    "gpu": _BY_ROWS,
    "gpu-full": _GPU,
}


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    calls = _calls(case, session.device)
    timer = make_timer(session.device)
    with matmul_precision(torch.device(session.device), "fp32"):
        for row in rows:
            with attempt(row):  # torch without this form, or too little memory
                calls[row.provider]()
        race([(row, calls[row.provider]) for row in rows], session.rounds(), timer)
    size = case["vocabulary"] * case["hidden"]
    rates = {"copy": ("GB/s", 4e-9 * size), "scale": ("GB/s", 6e-9 * size)}
    for row in rows:
        if row.median is not None:
            unit, work = rates.get(row.provider, ("TFLOP/s", 2e-12 * case["tokens"] * size))
            row.cells[unit] = text.digits(work / row.median)
    calls.clear()


def _calls(case: Shape, device: str) -> dict[str, Callable[[], object]]:
    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=_BF16, device=device).normal_()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows, columns = case["tokens"], case["vocabulary"]
    depth, pitch = case["hidden"], case["pitch"]
    hidden, weight = normal(rows, depth), normal(columns, depth)
    narrow, wide = normal(rows, pitch)[:, :columns], empty(rows, pitch)[:, :columns]
    strided = output_view(empty(rows, pitch)[:, :columns], _BF16)
    strided.normal_()
    softmax = normal(rows, pitch)[:, :columns]
    for part in softmax.split(512):  # most of a vocabulary is unlikely
        part.copy_((2 * part.float() - 6).exp())
    head, dhidden = Head(weight), empty(rows, depth, dtype=_BF16)
    dhidden32 = empty(rows, depth)
    dweight, total = empty(columns, depth, dtype=_BF16), torch.zeros_like(weight, dtype=torch.float)
    half = torch.full((), 0.5, device=device)
    return {
        "logits bf16": lambda: project(hidden, head, narrow),
        "logits fp32": lambda: project(hidden, head, wide),
        "dhidden": lambda: torch.mm(narrow, weight, out=dhidden),
        "dhidden fp32": lambda: accumulate(dhidden32, narrow, weight, True),
        "dhidden, softmax": lambda: torch.mm(softmax, weight, out=dhidden),
        "dhidden, strided": lambda: torch.mm(strided, weight, out=dhidden),
        "dweight": lambda: accumulate(dweight, narrow.t(), hidden, True),
        "dweight, softmax": lambda: accumulate(dweight, softmax.t(), hidden, True),
        "dweight, strided": lambda: accumulate(dweight, strided.t(), hidden, True),
        "dweight fp32": lambda: accumulate(total, narrow.t(), hidden, True),
        "dweight fp32, added": lambda: accumulate(total, narrow.t(), hidden, False),
        "copy": lambda: dweight.copy_(weight),
        "scale": lambda: torch.mul(total, half, out=dweight),
    }


test_products = check_row
