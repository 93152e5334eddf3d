"""The passes of a sparse backward, each next to the time that its bytes take; for GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import real_text
from benchmarks.check import relative_error
from benchmarks.conftest import Session
from benchmarks.measure import attempt, free
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.problem import make_problem
from benchmarks.results import Row
from benchmarks.shapes import REAL, make_case
from grpo_kernels import Bounded
from grpo_kernels.backends import Entries
from grpo_kernels.head import Head

FORMS = {
    COPY: "of the exponentials",
    "tails": "of a sample, for twelve cuts",
    "entries": "marked in one read, and listed",
    "hidden states": "gathered rows of the weight",
    "weight": "entries by id, gathered hidden states",
}
_CUT = 2.0**-12  # near that of the default tolerance on real text
_ALLOWED = {"hidden states": 2e-2, "weight": 2e-2}


@dataclass(frozen=True)
class Case:
    """Hidden states before a head, whose exponentials are read."""

    model: str
    rows: int
    inputs: str

    def facts(self) -> dict[str, Any]:
        kind = {"dtype": "bf16", "inputs": self.inputs}
        return {"kernel": "sparse backward", "model": self.model, "tokens": self.rows, **kind}

    def __str__(self) -> str:
        return f"{self.rows} rows, {self.inputs}"

    def unavailable(self, device: str) -> str | None:
        return real_text.absent(self.rows) if self.inputs == REAL else None


CASES = {
    "tiny": [Case("tiny", 32, "text-like")],
    "gpu": [Case("qwen3-1.7b", 2048, inputs) for inputs in (REAL, "text-like")],
    "gpu-full": [Case("qwen3-1.7b", 2048, inputs) for inputs in (REAL, "text-like")],
}


def names(case: Case) -> list[str]:
    return list(FORMS)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    if (reason := case.unavailable(session.device)) is not None:
        rows = [Row(name, FORMS[name]) for name in names]
        for row in rows:
            row.leave_out("absent", reason)
        return rows
    passes, errors = _passes(case, session.device)
    rows = [Row(name, FORMS[name], info={"entries": errors.pop("entries")}) for name in names[:1]]
    rows += [Row(name, FORMS[name]) for name in names[1:]]
    for row in rows:
        with attempt(row):
            passes[row.provider].call()
            if row.provider in errors:
                row.errors = {"result": errors[row.provider]()}
                wrong = not row.errors["result"] <= _ALLOWED[row.provider]
                row.leave_out("wrong", f"error {row.errors['result']:.1e}" if wrong else None)
    race_passes(rows, passes, session.rounds(20), session.device)
    passes.clear()
    free(session.device)
    return rows


def _passes(case: Case, device: str) -> tuple[dict[str, Pass], dict[str, Any]]:
    """Return the passes, and what their results are off by, on call."""
    from grpo_kernels.backends import Tile
    from grpo_kernels.backends.triton import (
        entries_matmul,
        entries_transposed_matmul,
        extract_entries,
        linear_logp_gradient,
        tail_sums,
    )

    problem = make_problem(
        make_case("logprobs", case.model, case.rows, "bf16", case.inputs), device
    )
    hidden, weight = problem.hidden.detach().flatten(0, 1), problem.weight.detach()
    target = problem.target.flatten()
    out = torch.empty(len(hidden), len(weight), dtype=torch.bfloat16, device=device)
    stats, gradient = linear_logp_gradient(hidden, Head(weight), target, out)
    tile = Tile(out, target, Head(weight).transform)
    one = torch.ones(len(hidden), device=device)
    cuts = _CUT * one
    ladder = torch.logspace(-6, 0, 12, device=device)

    def entries() -> Entries:
        return extract_entries(
            tile=tile,
            stats=stats,
            seed=0,
            first=0,
            cuts=cuts,
            slots=Bounded().slots,
            gradient=gradient,
        )

    found = entries()
    count = int(found.used.clamp(min=0).sum())
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def of_rows() -> Tensor:
        entries_matmul(found, one, weight, dhidden)
        return dhidden

    def of_head() -> Tensor:
        entries_transposed_matmul(found, one, hidden, dweight, False, count)
        return dweight

    gathered = count * hidden.shape[1] * hidden.element_size()
    words = out.numel() // 8
    passes = {
        COPY: copy_pass(out),
        "tails": Pass(lambda: tail_sums(tile, stats, one, ladder, gradient), out.nbytes // 32),
        "entries": Pass(entries, out.nbytes + 2 * words),
        "hidden states": Pass(of_rows, gathered + dhidden.nbytes),
        "weight": Pass(of_head, gathered + dweight.nbytes),
    }
    exact = _dense(found, len(weight))
    return passes, {
        "entries": [count / len(hidden), int(found.used.max())],
        "hidden states": lambda: relative_error(of_rows(), exact @ weight.float()),
        "weight": lambda: relative_error(of_head(), exact.t() @ hidden.float()),
    }


def _dense(found: Entries, columns: int) -> Tensor:
    """Return entries as a matrix (C, V) in fp32."""
    listed = torch.arange(found.ids.shape[1], device=found.ids.device) < found.used[:, None]
    rows = listed.nonzero()[:, 0]
    matrix = torch.zeros(len(found.used), columns, device=found.ids.device)
    matrix[rows, found.ids[listed].long()] = found.values[listed]
    return matrix


def test_entries(row: Row) -> None:
    """Time a pass."""
    assert row.seconds
