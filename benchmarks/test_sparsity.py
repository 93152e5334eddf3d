"""Sparsity of a policy's softmax: entries above a bound, and blocks with such an entry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from benchmarks import text
from benchmarks.conftest import Session, check_row
from benchmarks.problem import Problem, make_problem, softcapped
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, REAL, Case, make_case
from benchmarks.test_accuracy import distribution

_EXPONENTS = (8, 10, 12, 14, 16, 18, 20)
_ROWS, _COLUMNS = 128, 256  # of a block
NOTES = {f"p > 2^-{x}": f"softmax entries with p > 2^-{x}" for x in _EXPONENTS}
_CASES = [make_case("logprobs", "smollm2-135m", 2048, "fp32", inputs) for inputs in (REAL, DECIDED)]
CASES = {
    "tiny": [make_case("logprobs", "tiny", 32, "fp32", DECIDED)],
    "cpu": _CASES,
    "gpu-full": _CASES,
}


def about(case: Case, device: str) -> str:
    return distribution(make_problem(case, device))


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    problem = make_problem(case, session.device)
    probabilities = _probabilities(problem)
    target = problem.target.flatten()
    by_mass = probabilities.sum(0).argsort(descending=True)
    for row in rows:
        kept = probabilities > 0.5 ** int(row.provider.rpartition("-")[2])
        counts = kept.sum(1).double()
        left_out = probabilities.masked_fill(kept, 0.0)
        row.info = {
            "entries": [counts.mean().item(), counts.median().item(), counts.max().item()],
            "mass_left_out": left_out.sum(1).mean().item(),
            "gradient_left_out": _share_of_gradient(left_out, probabilities, target),
            "blocks": _blocks(kept),
            "blocks_by_mass": _blocks(kept[:, by_mass]),
        }
        mean, median, most = row.info["entries"]
        row.cells = {
            "entries of a row: mean, median, most": f"{mean:.0f}, {median:.0f}, {most:.0f}",
            "mass left out": text.error(row.info["mass_left_out"]),
            "relative L2 of dlogits left out": text.error(row.info["gradient_left_out"]),
            "blocks with one": f"{row.info['blocks']:.2f}",
            "ids sorted by mass": f"{row.info['blocks_by_mass']:.2f}",
        }


@torch.no_grad()
def _probabilities(problem: Problem) -> Tensor:
    """Return softmax probabilities, (T, V) fp32."""
    logits = problem.hidden.flatten(0, 1).float() @ problem.weight.float().T
    return softcapped(logits, problem.softcap).softmax(-1)


def _share_of_gradient(left_out: Tensor, probabilities: Tensor, target: Tensor) -> float:
    """Return the norm of the dlogits left out over the whole norm, for equal advantages."""
    of_target = probabilities.gather(1, target[:, None]).double().squeeze(1)
    others = probabilities.double().square().sum(1) - of_target.square()
    whole = (others + (1 - of_target).square()).sum().sqrt()
    left_out = left_out.scatter(1, target[:, None], 0.0)  # the target's entry is always kept
    return (left_out.double().square().sum().sqrt() / whole).item()


def _blocks(kept: Tensor) -> float:
    """Return the share of blocks of tokens and ids with a kept entry."""
    rows, columns = kept.shape
    whole = pad(kept, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    tiles = whole.unflatten(0, (-1, _ROWS)).unflatten(2, (-1, _COLUMNS))
    return tiles.any(3).any(1).double().mean().item()


test_sparsity = check_row
