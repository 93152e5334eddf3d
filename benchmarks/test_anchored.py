"""The GEMM whose epilogue stores softmax numerators, in every form; for Hopper GPUs."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.check import relative_error
from benchmarks.child import ChildError, ask_each
from benchmarks.conftest import Session
from benchmarks.measure import attempt, device_is_lost, free, race
from benchmarks.problem import make_problem
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Model, make_case
from benchmarks.timing import make_timer
from grpo_kernels.head import Head, matmul_precision, project

_CHECKED_ROWS, _CHECKED_TOKENS = 64, 256
_FIRST_CALL = 90.0  # seconds: its process starts, it compiles, it may hang
_ALLOWED = {"logp": 1e-4, "entropy": 1e-3, "E": 5e-3}
_OURS = "grpo_kernels.backends.triton.anchored"
_FORM = "form "
BASELINES = {
    "torch, bf16": "the logits, which are rounded",
    "torch, fp32": "the logits from bf16 operands",
    "ours, statistics": "the fused forward, which stores nothing",
    "ours, anchored": "the kernel of this package, with its check for rows far above their anchor",
}


@dataclass(frozen=True)
class Case:
    """Hidden states and a head."""

    model: Model
    tokens: int

    def facts(self) -> dict[str, Any]:
        head = {"hidden": self.model.hidden, "vocabulary": self.model.vocabulary}
        facts = {"kernel": "anchored GEMM", "model": self.model.name, "tokens": self.tokens}
        return {**facts, **head, "dtype": "bf16"}

    def __str__(self) -> str:
        return f"{self.model.name}, {self.tokens} tokens"


_GPU = [
    Case(MODELS[name], tokens) for name in ("qwen3-1.7b", "qwen3-8b") for tokens in (8192, 1024)
]
CASES = {"tiny": [Case(MODELS["tiny"], 32)], "gpu": _GPU, "gpu-full": _GPU}


def names(case: Case) -> list[str]:
    from benchmarks.gpu.anchored_forms import FORMS

    return [*BASELINES, *(f"{_FORM}{name}" for name in FORMS)]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    """Time the forms that were right in a process of their own, where they may hang or crash."""
    checked = _checked(case.model, session.device)
    calls = _calls(case, session.device)
    rows = []
    for name in names:
        row = Row(name, BASELINES.get(name, ""))
        if name in checked:
            row.errors = checked[name].errors
            row.leave_out(checked[name].state, checked[name].reason or None)
        elif name not in calls:
            row.leave_out("absent", f"there is no {_OURS}")
        if row.runs:
            with attempt(row):
                calls[name]()
        rows.append(row)
    with matmul_precision(torch.device(session.device), "fp32"):
        runs = [(row, calls[row.provider]) for row in rows if row.runs]
        race(runs, session.rounds(15), make_timer(session.device))
    rounded = rows[0].median
    for row in rows:
        if row.median:
            work = 2e-12 * case.tokens * case.model.hidden * case.model.vocabulary
            row.cells["TFLOP/s"] = text.digits(work / row.median)
            row.cells["x bf16 GEMM"] = text.ratio(row.median / rounded) if rounded else ""
    calls.clear()
    free(session.device)
    return rows


def _inputs(model: Model, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return peaked hidden states (T, D), a head (V, D) and targets (T,)."""
    problem = make_problem(make_case("logprobs", model.name, tokens, "bf16"), device, exact=False)
    return problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten()


def _calls(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    from benchmarks.gpu import anchored_forms
    from grpo_kernels.backends import triton

    hidden, weight, target = _inputs(case.model, case.tokens, device)
    head = Head(weight)
    pitch = anchored_forms.leading_dim(len(weight))
    narrow = hidden.new_empty(case.tokens, pitch)[:, : len(weight)]
    wide = torch.empty_like(narrow, dtype=torch.float32)
    calls: dict[str, Callable[[], Any]] = {
        "torch, bf16": lambda: project(hidden, head, narrow),
        "torch, fp32": lambda: project(hidden, head, wide),
        "ours, statistics": lambda: triton.linear_stats(hidden, head, target, "fp32", False),
    }
    if importlib.util.find_spec(_OURS):
        ours = importlib.import_module(_OURS)
        calls["ours, anchored"] = lambda: ours.linear_logp_gradient(hidden, head, target, narrow)
    for name, (config, store) in anchored_forms.FORMS.items():
        config = config.tiny() if device == "cpu" else config
        step = anchored_forms.prepare(hidden, weight, target, config, store=False)
        step = step._replace(e=narrow if store else None)  # one for all
        calls[f"{_FORM}{name}"] = partial(_anchored, step)
    return calls


def _anchored(step: Any) -> None:
    step.set_anchor()
    step.multiply()


@lru_cache
def _checked(model: Model, device: str) -> dict[str, Row]:
    """Return of every form what its first call gave, and whether that was right."""
    from benchmarks.gpu.anchored_forms import FORMS

    workers = min(8, os.cpu_count() or 1) if device == "cuda" else 2  # they compile side by side
    answers = ask_each(_check, [(name, model, device) for name in FORMS], workers, _FIRST_CALL)
    rows = {}
    for name, answer in zip(FORMS, answers, strict=True):
        row = rows[f"{_FORM}{name}"] = Row(name) if isinstance(answer, ChildError) else answer
        row.leave_out("wrong", str(answer) if isinstance(answer, ChildError) else None)
    return rows


def _check(name: str, model: Model, device: str) -> Row:
    """Compare a form with fp64; every buffer holds NaN before."""
    from benchmarks.gpu.anchored_forms import FORMS, prepare

    row = Row(name)
    with attempt(row):
        config, store = FORMS[name]
        inputs = _inputs(model, 32 if device == "cpu" else _CHECKED_TOKENS, device)
        step = prepare(*inputs, config.tiny() if device == "cpu" else config, store)
        step.poison()
        _anchored(step)
        row.errors = _errors(step)
        bad = [f"{k} {x:.1e}" for k, x in row.errors.items() if not x <= _ALLOWED[k]]
        row.leave_out("wrong", f"error of {', '.join(bad)}" if bad else None)
    if device_is_lost(device):
        raise RuntimeError(row.reason or "the device is lost")
    return row


def _errors(step: Any) -> dict[str, float]:
    """Compare statistics and E of some rows; NaN where something was not written."""
    rows, ln2 = slice(0, _CHECKED_ROWS), math.log(2.0)
    logits = step.hidden[rows].double() @ step.weight.double().t()
    logps = logits.log_softmax(1)
    exact = logps.gather(1, step.target[rows, None])[:, 0]
    total, moment = (x[rows] for x in step.merged())
    f2, a2, y = (x[rows].double() for x in (step.f2, step.a2, step.y_target))
    logp, entropy = (f2 * y - a2) * ln2 - total.log(), total.log() - ln2 * moment / total
    errors = {
        "logp": (logp - exact).abs().max().item(),
        "entropy": (entropy + (logps.exp() * logps).sum(1)).abs().max().item(),
    }
    if step.e is not None:
        errors["E"] = relative_error(step.e[rows], (logits * f2[:, None] - a2[:, None]).exp2())
        if any(bool(part.isnan().any()) for part in step.e.split(512)):
            errors["E"] = math.nan
    return errors


def test_anchored(row: Row) -> None:
    """Time a form."""
    assert row.seconds
