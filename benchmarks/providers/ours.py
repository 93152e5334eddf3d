"""This package: its backends, precisions and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from benchmarks.shapes import Case
from grpo_kernels import LossConfig, explain, linear_logprobs, linear_policy_loss
from grpo_kernels.backends import choose_backend, chunk_rows
from grpo_kernels.tools.estimate import HeadShape, default_schedule

_MEAN = LossConfig(loss_type="pg")  # with advantages of 1: the mean negative log-probability


def _runner(schedule: str, **settings: str) -> Callable[[Problem], Result]:
    def run(problem: Problem) -> Result:
        if problem.work.kind in ("forward", "backward"):
            return _run_logprobs(problem, settings)
        return run_loss(problem, {**settings, "schedule": schedule})

    return run


def _run_logprobs(problem: Problem, settings: dict[str, Any]) -> Result:
    work = problem.work
    with torch.set_grad_enabled(work.kind == "backward"):
        out = linear_logprobs(
            problem.hidden,
            problem.weight,
            problem.target,
            softcap=problem.softcap,
            outputs=("logprobs", "entropy") if work.entropy else ("logprobs",),
            **settings,
        )
    assert out.logprobs is not None
    if work.kind == "forward":
        return Result(logprobs=out.logprobs, entropy=out.entropy)
    return with_gradients(problem, out.logprobs, problem.dlogprobs, logprobs=out.logprobs)


def run_loss(problem: Problem, settings: dict[str, Any]) -> Result:
    """A loss, forward and backward; ``settings`` are those of ``linear_policy_loss``."""
    if problem.work.kind == "mean":
        problem = replace(problem, advantages=torch.ones_like(problem.advantages))
    loss, _ = linear_policy_loss(
        problem.hidden,
        problem.weight,
        problem.batch(),
        _MEAN if problem.work.kind == "mean" else problem.loss,
        softcap=problem.softcap,
        **settings,
    )
    return with_gradients(problem, loss, loss=loss)


def _planner(schedule: str, **settings: Any) -> Callable[[Problem], str | None]:
    def planned(problem: Problem) -> str | None:
        if problem.work.kind in ("forward", "backward"):
            return None
        loss = _MEAN if problem.work.kind == "mean" else problem.loss
        return explain(
            problem.hidden,
            problem.weight,
            problem.batch(),
            loss,
            softcap=problem.softcap,
            schedule=schedule,
            **settings,
        ).schedule

    return planned


def _bf16(case: Case) -> str | None:
    return None if case.dtype == "bf16" else "the same as ours: nothing is rounded"


def _losses(case: Case) -> str | None:
    return None if case.work.kind in ("mean", "loss") else "the same as ours: it has no schedule"


def splits_sequences(case: Case, device: str, precision: str = "fp32") -> bool:
    """Whether the loss needs whole sequences, and a tile of ours does not hold one."""
    loss = case.work.loss
    if loss is None or loss.scope() == "token":
        return False
    shape = (case.model.vocabulary, case.torch_dtype, precision)
    return case.length > chunk_rows(*shape, torch.device(device), None)


def auto_schedule(case: Case, device: str, precision: str = "fp32") -> str:
    """What ``schedule="auto"`` takes for a loss of ``case``."""
    if splits_sequences(case, device, precision):
        return "two_pass"
    model, work = case.model, case.work
    head = HeadShape(
        hidden=model.hidden,
        vocabulary=model.vocabulary,
        dtype=case.torch_dtype,
        frozen=work.frozen,
    )
    active = case.tokens if work.rows == "all" else case.tokens // 2
    return default_schedule(head, active, device=device, precision=precision)


def _not_the_default(case: Case) -> str | None:
    """For one_pass, which "auto" mostly takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if (reason := _losses(case)) is not None:
        return reason
    if splits_sequences(case, device):
        return "a sequence does not fit into a tile"
    chosen = auto_schedule(case, device)
    return "the same as ours: it is what ours chooses" if chosen == "one_pass" else None


def _unless_default(name: str) -> Callable[[str], str | None]:
    def missing(device: str) -> str | None:
        default = choose_backend("auto", torch.device(device), torch.float32).name
        return f"it is what ours runs on {device}" if name == default else None

    return missing


def _provider(name: str, note: str, schedule: str = "auto", **rest: Any) -> Provider:
    settings = {key: rest.pop(key) for key in ("precision", "backend") if key in rest}
    run, planned = _runner(schedule, **settings), _planner(schedule, **settings)
    return Provider(name=name, note=note, run=run, planned=planned, **rest)


OURS = _provider("ours", "the defaults: unrounded fp32 logits")
OURS_INPUT = _provider(
    "ours-input",
    'precision="input": logits rounded to the input dtype, as most peers do',
    precision="input",
    unable=_bf16,
)
OURS_ONE_PASS = _provider(
    "ours-one-pass",
    'schedule="one_pass": gradients in the forward; where ours chooses two_pass',
    "one_pass",
    unable=_not_the_default,
)
OURS_TWO_PASS = _provider(
    "ours-two-pass",
    'schedule="two_pass": the backward recomputes the logits',
    "two_pass",
    unable=_losses,
)
OURS_CHUNKED = _provider(
    "ours-chunked",
    'backend="chunked": row passes in torch',
    backend="chunked",
    missing=_unless_default("chunked"),
)
OURS_REFERENCE = _provider(
    "ours-reference",
    'backend="reference": full fp32 logits',
    backend="reference",
    missing=_unless_default("reference"),
)
OURS_ALL = (OURS, OURS_INPUT, OURS_ONE_PASS, OURS_TWO_PASS, OURS_CHUNKED, OURS_REFERENCE)
