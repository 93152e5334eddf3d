"""Errors of everybody on a policy's distributions, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import accuracy
from benchmarks.conftest import Session
from benchmarks.problem import make_problem
from benchmarks.providers import EVERY, PROVIDERS
from benchmarks.providers.numerics import ADDED
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, Case, make_case

_VALUES, _GRADIENTS = "logprobs-entropy", "dapo"


def _both(
    model: str, tokens: int, work: str = _VALUES, slow: Sequence[str] = ("bf16", "fp32")
) -> list[Case]:
    return [
        make_case(work, model, tokens, dtype, DECIDED, slow=dtype in slow)
        for dtype in ("bf16", "fp32")
    ]


# every token is kept, so they are few
CASES = {
    "tiny": [*_both("tiny", 32, slow=()), *_both("tiny", 32, _GRADIENTS, slow=())],
    "quick": [*_both("small", 64, slow=()), *_both("small", 64, _GRADIENTS, slow=())],
    "cpu": [*_both("qwen2.5-0.5b", 512), *_both("qwen2.5-0.5b", 256, _GRADIENTS)],
    "gpu": [
        *_both("qwen3-1.7b", 1024, slow=("bf16",)),
        *_both("qwen3-1.7b", 1024, _GRADIENTS, slow=()),
    ],
    "gpu-full": [
        *_both("qwen3-1.7b", 1024),
        *_both("qwen3-1.7b", 1024, _GRADIENTS),
        *_both("qwen3-8b", 1024),
    ],
}


def names(case: Case) -> list[str]:
    return [*PROVIDERS, *(provider.name for provider in ADDED)]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    providers = [EVERY[name] for name in names]
    return accuracy.measure_accuracy(case, providers, session.settings(case))


def about(case: Case, device: str) -> str:
    return accuracy.distribution(make_problem(case, device))


def test_accuracy(row: Row) -> None:
    """Compare values, or a loss and its gradients."""
    assert row.errors or row.info
