"""Rounding an fp32 sum of the weight's gradient to bf16, times a factor on the GPU; for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.conftest import Session, check_row
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.results import Row
from benchmarks.shapes import Shape

_SCALE = 0.75
NOTES = {
    COPY: "of the fp32 sum",
    "torch, scaled": "torch.mul of fp32 by a scalar on the device, into bf16",
    "torch, rounded": "copy_ of fp32 into bf16",
    "triton, scaled": "ours, 16 bytes a thread, fp32 into new bf16 memory",
    "torch, bf16 scaled": "mul_ of bf16 by an fp32 scalar on the device",
    "triton, bf16 scaled": "ours, bf16 in place",
}


def _weight(columns: int, depth: int) -> Shape:
    kind = {"kernel": "rounding", "model": "dweight", "tokens": 0}
    facts = {**kind, "hidden": depth, "vocabulary": columns, "dtype": "bf16"}
    return Shape(f"V={columns}, D={depth}", facts)


_GPU = [_weight(151936, depth) for depth in (2048, 4096)]
CASES = {"tiny": [_weight(304, 40)], "gpu": _GPU, "gpu-full": _GPU}


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    generator = torch.Generator(session.device).manual_seed(0)
    wide = torch.empty(case["vocabulary"], case["hidden"], device=session.device)
    wide.normal_(generator=generator)
    race_passes(rows, _passes(wide), {"bits that differ": 0.0}, session)


def _passes(wide: Tensor) -> dict[str, Pass]:
    """Return the forms by name; each returns its result, with the same bits as torch."""
    from grpo_kernels.backends.triton import scaled

    out = torch.empty_like(wide, dtype=torch.bfloat16)
    scale = torch.full((), _SCALE, device=wide.device)
    one = torch.ones((), device=wide.device)  # repeated calls leave bf16 unchanged

    def refill() -> None:
        out.copy_(wide)

    def same(factor: float) -> Callable[[Tensor], dict[str, float]]:
        expected = torch.mul(wide, factor).to(torch.bfloat16)
        return lambda result: (
            {} if torch.equal(result, expected) else {"bits that differ": float("nan")}
        )

    both, narrow = wide.nbytes + out.nbytes, 2 * out.nbytes
    scaling, rounding = same(_SCALE), same(1.0)
    new = torch.bfloat16
    return {
        COPY: copy_pass(wide),
        "torch, scaled": Pass(lambda: torch.mul(wide, scale, out=out), both, errors=scaling),
        "torch, rounded": Pass(lambda: out.copy_(wide), both, errors=rounding),
        "triton, scaled": Pass(lambda: scaled(wide, scale, new), both, errors=scaling),
        "torch, bf16 scaled": Pass(lambda: out.mul_(one), narrow, refill, rounding),
        "triton, bf16 scaled": Pass(lambda: scaled(out, one, new), narrow, refill, rounding),
    }


test_rounding = check_row
