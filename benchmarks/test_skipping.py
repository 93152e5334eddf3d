"""What rows without a gradient cost: tokens that the loss clips, of any share of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import text
from benchmarks.check import reference, reference_dtype
from benchmarks.conftest import Session
from benchmarks.measure import attempt, check_outputs, free, race
from benchmarks.problem import Problem, detached, make_problem, statistics
from benchmarks.providers import EVERY
from benchmarks.results import Row
from benchmarks.shapes import Case, make_case
from benchmarks.tables import BARE
from benchmarks.timing import make_timer

_CLIPPED, _FREE = 0.35, 0.05  # log-ratios outside and inside of the bounds
PROVIDERS = (BARE, "bare-gemms-whole", "ours", "ours-queued", "liger-triton", "liger-triton-queued")


@dataclass(frozen=True)
class Share:
    """A case in which the loss clips a share of the tokens."""

    case: Case
    share: float

    def facts(self) -> dict[str, Any]:
        return self.case.facts() | {"kernel": f"{text.percent(self.share)} without a gradient"}

    def __str__(self) -> str:
        return f"{text.percent(self.share)} without a gradient, {self.case}"

    def make(self, device: str) -> Problem:
        """Set old log-probabilities so that these tokens are clipped, and no others."""
        problem = make_problem(self.case, device)
        exact = detached(problem, reference_dtype(self.case, device))
        rows = exact.hidden.flatten(0, 1), exact.target.flatten(), exact.weight
        logprobs, _ = statistics(*rows, exact.softcap)
        generator = torch.Generator().manual_seed(3)
        chosen = torch.rand(problem.target.shape, generator=generator) < self.share
        clipped = _CLIPPED * problem.advantages.sign()[:, None]  # beyond the bound that counts
        log_ratios = torch.where(chosen.to(clipped.device), clipped, _FREE)
        return replace(problem, old_logprobs=logprobs.view_as(log_ratios).float() - log_ratios)


def _shares(model: str, tokens: int) -> list[Share]:
    case = make_case("dapo", model, tokens, "bf16")
    return [Share(case, share) for share in (0.0, 0.02, 0.2, 0.8)]


_GPU = [*_shares("qwen3-1.7b", 8192), *_shares("qwen3-1.7b", 1024)]
CASES = {"tiny": _shares("tiny", 32), "gpu": _GPU, "gpu-full": _GPU}


def names(share: Share) -> list[str]:
    return list(PROVIDERS)


def measure(share: Share, names: Sequence[str], session: Session) -> list[Row]:
    problem, settings = share.make(session.device), session.settings(share.case, bits=False)
    exact = reference(problem)
    rows = [Row(name, EVERY[name].note) for name in names]
    timers = {queued: make_timer(session.device, queued) for queued in (False, True)}
    for row in rows:
        provider = EVERY[row.provider]
        row.leave_out("absent", provider.absent(session.device))
        with attempt(row):
            row.leave_out("unable", provider.redundant(problem))
            if row.runs:
                check_outputs(provider, row, problem, exact, settings)
        free(session.device)
    providers = [(row, EVERY[row.provider]) for row in rows if row.runs]
    race(providers, session.rounds(), lambda x: timers[x.queued](lambda: x.run(problem)))
    return rows


def test_skipping(row: Row) -> None:
    """Time a loss."""
    assert row.seconds
