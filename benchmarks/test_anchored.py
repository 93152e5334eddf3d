"""The GEMM with an epilogue that stores softmax numerators, in every form; for Hopper GPUs."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.check import relative_error
from benchmarks.child import ChildError, ask_each
from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt, device_is_lost, race
from benchmarks.problem import make_problem
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Shape, make_case
from benchmarks.timing import make_timer
from grpo_kernels.backends import RowStats
from grpo_kernels.backends.gpu_tiles import LinearConfig, aligned_config
from grpo_kernels.head import Head, matmul_precision, project

_CHECKED_TOKENS = 256
_FIRST_CALL = 90.0  # seconds: its process starts, it compiles, it may hang
_ALLOWED = {"logp": 1e-4, "entropy": 1e-3, "gradient": 5e-3}
_FORM = "form "
BASELINES = {
    "torch, bf16": "the logits, which are rounded",
    "torch, fp32": "the logits from bf16 operands",
    "ours, statistics": "the fused forward, which stores nothing",
}
_BASE = aligned_config("sm_90")
FORMS: dict[str, LinearConfig] = {
    "ours": _BASE,
    "flat": replace(_BASE, flat=1),
    "1 subtile": replace(_BASE, subtiles=1),
    "1 subtile, flat": replace(_BASE, subtiles=1, flat=1),
    "4 stages": replace(_BASE, num_stages=4),
    "tiles 4": replace(_BASE, tiles=4),
    "tiles 16": replace(_BASE, tiles=16),
    "group 8": replace(_BASE, group=8),
    "group 32": replace(_BASE, group=32),
    "group 64": replace(_BASE, group=64),
    "128x128, 4 stages": replace(_BASE, block_v=128, subtiles=1, num_stages=4, tiles=16),
    "256x128": replace(_BASE, block_t=256, block_v=128, tiles=16, group=8),
}


def _case(model: str, tokens: int) -> Shape:
    head = {"hidden": MODELS[model].hidden, "vocabulary": MODELS[model].vocabulary}
    facts = {"kernel": "anchored GEMM", "model": model, "tokens": tokens, **head, "dtype": "bf16"}
    return Shape(f"{model}, {tokens} tokens", facts)


_GPU = [_case(name, tokens) for name in ("qwen3-1.7b", "qwen3-8b") for tokens in (8192, 1024)]
CASES = {"tiny": [_case("tiny", 32)], "gpu": _GPU, "gpu-full": _GPU}
NOTES = BASELINES | {f"{_FORM}{name}": "" for name in FORMS}


def measure(case: Shape, rows: Sequence[Row], session: Session) -> None:
    """Time the forms that were right in a separate process, where they may hang or crash."""
    checked = _checked(case["model"], session.device)
    calls = _calls(case, session.device)
    for row in rows:
        if row.provider in checked:
            row.errors = checked[row.provider].errors
            row.leave_out(checked[row.provider].state, checked[row.provider].reason or None)
        if row.runs:
            with attempt(row):
                calls[row.provider]()
    with matmul_precision(torch.device(session.device), "fp32"):
        runs = [(row, calls[row.provider]) for row in rows if row.runs]
        race(runs, session.rounds(15), make_timer(session.device))
    rounded = rows[0].median
    for row in rows:
        if row.median:
            work = 2e-12 * case["tokens"] * case["hidden"] * case["vocabulary"]
            row.cells["TFLOP/s"] = text.digits(work / row.median)
            row.cells["x bf16 GEMM"] = text.ratio(row.median / rounded) if rounded else ""


def _inputs(model: str, tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return peaked hidden states (T, D), a head (V, D) and targets (T,)."""
    problem = make_problem(make_case("logprobs", model, tokens, "bf16"), device, exact=False)
    return problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten()


def _calls(case: Shape, device: str) -> dict[str, Callable[[], Any]]:
    from grpo_kernels.backends import triton

    hidden, weight, target = _inputs(case["model"], case["tokens"], device)
    head, narrow = Head(weight), _output(hidden, weight)
    wide = torch.empty_like(narrow, dtype=torch.float32)
    calls: dict[str, Callable[[], Any]] = {
        "torch, bf16": lambda: project(hidden, head, narrow),
        "torch, fp32": lambda: project(hidden, head, wide),
        "ours, statistics": lambda: triton.linear_stats(hidden, head, target, "fp32", False),
    }
    for name, form in FORMS.items():
        config = _tile(form, device)
        calls[f"{_FORM}{name}"] = partial(
            triton.linear_logp_gradient, hidden, head, target, narrow, config
        )
    return calls


def _output(hidden: Tensor, weight: Tensor) -> Tensor:
    pitch = -(-len(weight) // 64) * 64  # the copy engine needs rows at multiples of 16 bytes
    return hidden.new_empty(len(hidden), pitch)[:, : len(weight)]


def _tile(form: LinearConfig, device: str) -> LinearConfig:
    """Return the form, or a small one like it for the interpreter."""
    if device == "cuda":
        return form
    return replace(form, block_t=16, block_v=64, block_d=32, tiles=2, group=2, descriptors=0)


@lru_cache
def _checked(model: str, device: str) -> dict[str, Row]:
    """Return the result of the first call of every form, and whether it was right."""
    workers = min(8, os.cpu_count() or 1) if device == "cuda" else 2  # they compile side by side
    answers = ask_each(_check, [(name, model, device) for name in FORMS], workers, _FIRST_CALL)
    rows = {}
    for name, answer in zip(FORMS, answers, strict=True):
        row = rows[f"{_FORM}{name}"] = Row(name) if isinstance(answer, ChildError) else answer
        row.leave_out("wrong", str(answer) if isinstance(answer, ChildError) else None)
    return rows


def _check(name: str, model: str, device: str) -> Row:
    """Compare a form with fp64, starting from a result full of NaN."""
    from grpo_kernels.backends import triton

    row = Row(name)
    with attempt(row):
        hidden, weight, target = _inputs(model, 32 if device == "cpu" else _CHECKED_TOKENS, device)
        out = _output(hidden, weight).fill_(math.nan)
        config = _tile(FORMS[name], device)
        stats, gradient = triton.linear_logp_gradient(hidden, Head(weight), target, out, config)
        assert gradient.row_scale is not None
        dlogits = gradient.dlogits.double() * gradient.row_scale.double()[:, None]
        row.errors = _errors(hidden.double() @ weight.double().t(), target, stats, dlogits)
        bad = [f"{k} {x:.1e}" for k, x in row.errors.items() if not x <= _ALLOWED[k]]
        row.leave_out("wrong", f"error of {', '.join(bad)}" if bad else None)
    if device_is_lost(device):
        raise RuntimeError(row.reason or "the device is lost")
    return row


def _errors(logits: Tensor, target: Tensor, stats: RowStats, dlogits: Tensor) -> dict[str, float]:
    logps = logits.log_softmax(1)
    exact = logps.gather(1, target[:, None])[:, 0]
    truth = torch.nn.functional.one_hot(target, logits.shape[1]) - logps.exp()
    return {
        "logp": (stats.logprobs - exact).abs().max().item(),
        "entropy": (stats.entropy + (logps.exp() * logps).sum(1)).abs().max().item(),
        "gradient": relative_error(dlogits, truth),
    }


test_anchored = check_row
