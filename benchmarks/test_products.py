"""Each GEMM of a step in every form, and a copy; for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.conftest import Session
from benchmarks.measure import attempt, free, race
from benchmarks.results import Row
from benchmarks.timing import make_timer
from grpo_kernels.backends import output_view
from grpo_kernels.head import Head, accumulate, matmul_precision, project

_BF16 = torch.bfloat16
_COLUMNS, _ODD, _PADDED = 151936, 151665, 151680
FORMS = {
    "logits bf16": "what the others are held against",
    "logits fp32": "16-bit operands, fp32 results",
    "dhidden": "a tile without gaps",
    "dhidden fp32": "a sum of one chunk",
    "dhidden, softmax": "as dhidden, of values like a softmax's: GEMMs take longer for random bits",
    "dhidden, strided": "the first half of each row of an fp32 tile",
    "dweight": "as dhidden",
    "dweight, softmax": "as dhidden, softmax",
    "dweight, strided": "as dhidden, strided",
    "dweight fp32": "a sum of one chunk",
    "dweight fp32, added": "the sum of further chunks",
    "copy": "of the weight",
    "scale": "an fp32 gradient of the weight to bf16",
}


@dataclass(frozen=True)
class Case:
    """A tile of logits."""

    rows: int  # C
    columns: int  # V
    depth: int  # D
    pitch: int  # elements from one row of the tile to the next

    def facts(self) -> dict[str, Any]:
        head = {"hidden": self.depth, "vocabulary": self.columns}
        pitch = f"rows of {self.pitch} elements"
        return {"model": pitch, "tokens": self.rows, **head, "dtype": "bf16"}

    def __str__(self) -> str:
        return f"C={self.rows}, V={self.columns}, D={self.depth}, pitch={self.pitch}"


# heights of a chunk; an odd one, and the next multiple of 256
_BY_ROWS = [
    Case(rows, _COLUMNS, depth, _COLUMNS)
    for depth in (2048, 4096)
    for rows in (1280, 2048, 4096, 6553, 6656, 8192)
]
_GPU = [
    *_BY_ROWS,
    *(Case(8192, _ODD, 2048, pitch) for pitch in (_ODD, _PADDED)),
    *(Case(rows, _COLUMNS, 896, _COLUMNS) for rows in (4096, 8192)),
]
CASES = {
    "tiny": [Case(16, 257, 32, 272)],
    "cpu": [Case(1024, _COLUMNS, 896, _COLUMNS)],
    "gpu": _BY_ROWS,
    "gpu-full": _GPU,
}


def names(case: Case) -> list[str]:
    return list(FORMS)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    calls = _calls(case, session.device)
    rows, timer = [Row(name, FORMS[name]) for name in names], make_timer(session.device)
    with matmul_precision(torch.device(session.device), "fp32"):
        for row in rows:
            with attempt(row):  # torch without this form, or too little memory
                calls[row.provider]()
        race([(row, calls[row.provider]) for row in rows], session.rounds(), timer)
    size = case.columns * case.depth
    rates = {"copy": ("GB/s", 4e-9 * size), "scale": ("GB/s", 6e-9 * size)}
    for row in rows:
        if row.median is not None:
            unit, work = rates.get(row.provider, ("TFLOP/s", 2e-12 * case.rows * size))
            row.cells[unit] = text.digits(work / row.median)
    calls.clear()
    free(session.device)
    return rows


def _calls(case: Case, device: str) -> dict[str, Callable[[], object]]:
    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=_BF16, device=device).normal_()

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    rows, columns, depth, pitch = case.rows, case.columns, case.depth, case.pitch
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


def test_products(row: Row) -> None:
    """Time a GEMM."""
    assert row.seconds
