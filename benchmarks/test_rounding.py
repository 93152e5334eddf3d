"""An fp32 sum of the weight's gradient to bf16, and times a factor that the GPU has; for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.conftest import Session
from benchmarks.measure import attempt, free
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.results import Row

_SCALE = 0.75
FORMS = {
    COPY: "of the fp32 sum",
    "torch, scaled": "torch.mul of fp32 by a scalar on the device, into bf16",
    "torch, rounded": "copy_ of fp32 into bf16",
    "triton, scaled": "ours, 16 bytes a thread, fp32 into bf16, whose memory is new",
    "torch, bf16 scaled": "mul_ of bf16 by an fp32 scalar on the device",
    "triton, bf16 scaled": "ours, bf16 in place",
}


@dataclass(frozen=True)
class Case:
    """A weight."""

    columns: int  # V
    depth: int  # D

    def facts(self) -> dict[str, Any]:
        head = {"hidden": self.depth, "vocabulary": self.columns}
        return {"kernel": "rounding", "model": "dweight", "tokens": 0, **head, "dtype": "bf16"}

    def __str__(self) -> str:
        return f"V={self.columns}, D={self.depth}"


_GPU = [Case(151936, depth) for depth in (2048, 4096)]
CASES = {"tiny": [Case(304, 40)], "gpu": _GPU, "gpu-full": _GPU}


def names(case: Case) -> list[str]:
    return list(FORMS)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    generator = torch.Generator(session.device).manual_seed(0)
    wide = torch.empty(case.columns, case.depth, device=session.device)
    wide.normal_(generator=generator)
    passes = _passes(wide)
    expected_scaled = torch.mul(wide, _SCALE).to(torch.bfloat16)
    expected = {"torch, rounded": wide.to(torch.bfloat16)}
    expected |= {f"{name}, bf16 scaled": wide.to(torch.bfloat16) for name in ("torch", "triton")}
    rows = [Row(name, FORMS[name]) for name in names]
    for row in rows:
        if row.provider == COPY:
            continue
        with attempt(row):
            passes[row.provider].restore()
            result = passes[row.provider].call()
            same = torch.equal(result, expected.get(row.provider, expected_scaled))
            row.leave_out("wrong", None if same else "other bits than torch's")
    race_passes(rows, passes, session.rounds(20), session.device)
    free(session.device)
    return rows


def _passes(wide: Tensor) -> dict[str, Pass]:
    """Return the forms by name; each returns what it computes."""
    from grpo_kernels.backends.triton import scaled

    out = torch.empty_like(wide, dtype=torch.bfloat16)
    scale = torch.full((), _SCALE, device=wide.device)
    one = torch.ones((), device=wide.device)  # bf16 stays as it is, however often

    def refill() -> None:
        out.copy_(wide)

    both = wide.nbytes + out.nbytes
    return {
        COPY: copy_pass(wide),
        "torch, scaled": Pass(lambda: torch.mul(wide, scale, out=out), both),
        "torch, rounded": Pass(lambda: out.copy_(wide), both),
        "triton, scaled": Pass(lambda: scaled(wide, scale, torch.bfloat16), both),
        "torch, bf16 scaled": Pass(lambda: out.mul_(one), 2 * out.nbytes, refill),
        "triton, bf16 scaled": Pass(
            lambda: scaled(out, one, torch.bfloat16), 2 * out.nbytes, refill
        ),
    }


def test_rounding(row: Row) -> None:
    """Time a pass over the weight's gradient."""
    assert row.seconds
