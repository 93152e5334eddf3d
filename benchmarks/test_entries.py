"""The passes of a sparse backward, each next to a copy of its bytes; for GPUs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks import real_text
from benchmarks.check import relative_error
from benchmarks.conftest import Session, check_row
from benchmarks.passes import COPY, Pass, copy_pass, race_passes
from benchmarks.problem import make_problem
from benchmarks.results import Row
from benchmarks.shapes import REAL, Shape, make_case
from grpo_kernels import Bounded
from grpo_kernels.backends import Entries
from grpo_kernels.head import Head

NOTES = {
    COPY: "of the exponentials",
    "tails": "of a sample, for twelve cuts",
    "entries": "marked in one read, and listed",
    "hidden states": "gathered rows of the weight",
    "weight": "entries by id, gathered hidden states",
}
_CUT = 2.0**-12  # near the cut of the default tolerance on real text
_ALLOWED = 2e-2


def _rows(model: str, count: int, inputs: str) -> Shape:
    kind = {"model": model, "tokens": count, "dtype": "bf16", "inputs": inputs}
    return Shape(f"{count} rows, {inputs}", {"kernel": "sparse backward", **kind})


CASES = {
    "tiny": [_rows("tiny", 32, "text-like")],
    "gpu": [_rows("qwen3-1.7b", 2048, inputs) for inputs in (REAL, "text-like")],
    "gpu-full": [_rows("qwen3-1.7b", 2048, inputs) for inputs in (REAL, "text-like")],
}


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    reason = real_text.absent(case["tokens"]) if case["inputs"] == REAL else None
    for row in rows:
        row.leave_out("absent", reason)
    if reason is None:
        passes, rows[0].info["entries"] = _passes(case, session.device)
        race_passes(rows, passes, {"result": _ALLOWED}, session)


def _passes(case: Shape, device: str) -> tuple[dict[str, Pass], list[float]]:
    """Return the passes, and the mean and the largest number of entries of a row."""
    from grpo_kernels.backends import Tile
    from grpo_kernels.backends.triton import (
        entries_matmul,
        entries_transposed_matmul,
        extract_entries,
        linear_logp_gradient,
        tail_sums,
    )

    problem = make_problem(
        make_case("logprobs", case["model"], case["tokens"], "bf16", case["inputs"]), device
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
    exact = _dense(found, len(weight))
    passes = {
        COPY: copy_pass(out),
        "tails": Pass(lambda: tail_sums(tile, stats, one, ladder, gradient), out.nbytes // 32),
        "entries": Pass(entries, out.nbytes + 2 * words),
        "hidden states": Pass(
            of_rows,
            gathered + dhidden.nbytes,
            errors=lambda result: {"result": relative_error(result, exact @ weight.float())},
        ),
        "weight": Pass(
            of_head,
            gathered + dweight.nbytes,
            errors=lambda result: {"result": relative_error(result, exact.t() @ hidden.float())},
        ),
    }
    return passes, [count / len(hidden), int(found.used.max())]


def _dense(found: Entries, columns: int) -> Tensor:
    """Return entries as a matrix (C, V) in fp32."""
    listed = torch.arange(found.ids.shape[1], device=found.ids.device) < found.used[:, None]
    rows = listed.nonzero()[:, 0]
    matrix = torch.zeros(len(found.used), columns, device=found.ids.device)
    matrix[rows, found.ids[listed].long()] = found.values[listed]
    return matrix


test_entries = check_row
