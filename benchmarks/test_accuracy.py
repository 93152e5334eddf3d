"""Errors of all providers on a policy's distributions against fp64, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.check import compare, reference_dtype
from benchmarks.conftest import Session, check_row
from benchmarks.measure import Settings
from benchmarks.measure import measure as measured
from benchmarks.problem import Problem, Result, detached, make_problem, statistics
from benchmarks.providers import COMPARED, EVERY, PROVIDERS
from benchmarks.providers.base import Provider
from benchmarks.results import Row
from benchmarks.shapes import DECIDED, DTYPES, REAL, WORKS, Case, make_case
from benchmarks.tables import competes

_VALUES, _GRADIENTS = "logprobs-entropy", "dapo"
# Nats of a token, and a part of a tensor's norm: rounding logits to 16 bits changes both by less.
_WRONG = 0.5
# tokens by their probability p: above the first bound, and at most the second
BANDS = {
    "p > 0.98": (0.98, math.inf),
    "p 0.5 to 0.98": (0.5, 0.98),
    "p < 0.5": (-math.inf, 0.5),
}


def _both(model: str, values: int, gradients: int, *slow: str, inputs: str = DECIDED) -> list[Case]:
    """Return cases for values and for gradients; all values are kept, so the tokens are few."""
    return [
        make_case(work, model, tokens, dtype, inputs, slow=dtype in slow)
        for work, tokens in ((_VALUES, values), (_GRADIENTS, gradients))
        for dtype in ("bf16", "fp32")
    ]


_GPU = _both("qwen3-1.7b", 1024, 1024, *DTYPES)
CASES = {
    "tiny": _both("tiny", 32, 32),
    "quick": _both("small", 64, 64),
    "cpu": [
        *_both("qwen2.5-0.5b", 512, 256, *DTYPES),
        *_both("smollm2-135m", 512, 256, *DTYPES, inputs=REAL),
    ],
    "gpu": [replace(case, slow=case == _GPU[0]) for case in _GPU],
    "gpu-full": [*_GPU, *_both("qwen3-8b", 1024, 1024, *DTYPES)[:2]],
}


def notes(case: Case) -> dict[str, str]:
    shown = [*filter(competes, PROVIDERS), *(provider.name for provider in COMPARED)]
    return {name: EVERY[name].note for name in shown}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    measure_accuracy(case, [(EVERY[row.provider], row) for row in rows], session.settings(case))


def about(case: Case, device: str) -> str:
    return distribution(make_problem(case, device))


def measure_accuracy(case: Case, runs: Sequence[tuple[Provider, Row]], settings: Settings) -> None:
    """Compare all providers with fp64, token by token; some have no entropy."""
    assert reference_dtype(case, settings.device) == torch.float64, "too large for fp64"
    values = replace(case, work=WORKS["logprobs"])
    calls = [
        (provider, values if case.work.kind != "loss" and provider.unable(case) else case, row)
        for provider, row in runs
    ]
    measured(calls, replace(settings, rounds=0), _check)
    for _, row in runs:
        outputs = ("loss", "dhidden", "dweight") if row.runs else ()
        row.cells = {name: text.error(row.errors.get(name)) for name in outputs}
        for name, found in row.info.items():
            if name != "alone":  # a separate process
                row.cells[name] = f"{text.error(found[0])} ({text.error(found[1])})"


def distribution(problem: Problem) -> str:
    """Describe the distributions of a problem: its tokens and their entropies."""
    exact = detached(problem, reference_dtype(problem.case, problem.hidden.device.type))
    rows = exact.hidden.flatten(0, 1), exact.target.flatten(), exact.weight
    logprobs, entropy = statistics(*rows, exact.softcap)
    shares = ", ".join(f"{100 * within(x, logprobs).double().mean():.0f} % {x}" for x in BANDS)
    return (
        f"{shares}; the rarest {text.error(logprobs.min().exp().item())}; "
        f"entropies: mean {entropy.mean():.2g}, median {entropy.median():.2g}, "
        f"at most {entropy.max():.2g} nats"
    )


def within(band: str, logprobs: Tensor) -> Tensor:
    """Return which tokens are in a band."""
    low, high = BANDS[band]
    return (logprobs.exp() > low) & (logprobs.exp() <= high)


def _check(
    provider: Provider, row: Row, problem: Problem, exact: Result, settings: Settings
) -> None:
    result = provider.run(problem)
    row.errors, wrong = compare(result, exact, problem, _WRONG)
    row.leave_out("wrong", wrong)
    if not row.runs:
        return
    outputs = problem.work.outputs
    off = {name: getattr(result, name).double() - getattr(exact, name) for name in outputs}
    if problem.work.kind == "loss":
        norms = exact.dhidden.norm(dim=-1)
        relative = off["dhidden"].norm(dim=-1) / norms
        row.info |= _by_band("rows of dhidden", relative, exact.logprobs, norms > 0)
        return
    worst = torch.stack([*off.values()]).abs().max().item()
    if not worst <= _WRONG:
        row.leave_out("wrong", f"a value is off by {worst:.1e}; allowed {_WRONG:g}")
        return
    row.info |= _by_band("logp", off["logprobs"], exact.logprobs, problem.mask)
    noise = off["logprobs"].expm1().abs()  # of an importance ratio with an exact other side
    row.info["ratio noise"] = [noise.mean().item(), noise.max().item()]
    if "entropy" in off:
        entropy = off["entropy"].abs()
        row.info["H"] = [entropy.median().item(), entropy.max().item()]


def _by_band(name: str, errors: Tensor, logprobs: Tensor, counts: Tensor) -> dict[str, list[float]]:
    """Return the median and the largest error of each band with tokens."""
    bands = {band: errors[within(band, logprobs) & counts].abs().tolist() for band in BANDS}
    return {f"{name}, {b}": [median(x), max(x)] for b, x in bands.items() if x}


test_accuracy = check_row
