"""Cost of rows without a gradient: tokens that the loss clips, by their share of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks import text
from benchmarks.check import reference_dtype
from benchmarks.conftest import Session, check_row
from benchmarks.measure import measure as measured
from benchmarks.problem import Problem, detached, statistics
from benchmarks.providers import EVERY
from benchmarks.results import Row
from benchmarks.shapes import Case, make_case
from benchmarks.tables import BARE

_CLIPPED, _FREE = 0.35, 0.05  # log-ratios outside and inside the bounds
_NAMES = (BARE, "bare-gemms-whole", "ours", "ours-queued", "liger-triton", "liger-triton-queued")
NOTES = {name: EVERY[name].note for name in _NAMES}


def _clip(share: float, problem: Problem) -> Problem:
    """Set old log-probabilities so that exactly a share of the tokens is clipped."""
    exact = detached(problem, reference_dtype(problem.case, problem.hidden.device.type))
    rows = exact.hidden.flatten(0, 1), exact.target.flatten(), exact.weight
    logprobs, _ = statistics(*rows, exact.softcap)
    generator = torch.Generator().manual_seed(3)
    chosen = torch.rand(problem.target.shape, generator=generator) < share
    clipped = _CLIPPED * problem.advantages.sign()[:, None]  # beyond the bound that counts
    log_ratios = torch.where(chosen.to(clipped.device), clipped, _FREE)
    return replace(problem, old_logprobs=logprobs.view_as(log_ratios).float() - log_ratios)


def _shares(model: str, tokens: int) -> list[Case]:
    case = make_case("dapo", model, tokens, "bf16")
    titles = {share: f"{text.percent(share)} without a gradient" for share in (0.0, 0.02, 0.2, 0.8)}
    return [replace(case, title=x, change=partial(_clip, share)) for share, x in titles.items()]


_GPU = [*_shares("qwen3-1.7b", 8192), *_shares("qwen3-1.7b", 1024)]
CASES = {"tiny": _shares("tiny", 32), "gpu": _GPU, "gpu-full": _GPU}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    calls = [(EVERY[row.provider], case, row) for row in rows]
    measured(calls, session.settings(case, bits=False))


test_skipping = check_row
