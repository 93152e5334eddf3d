"""This package: its backends, precisions and schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from benchmarks.shapes import Case
from grpo_kernels import LossConfig, explain, linear_logprobs, linear_policy_loss
from grpo_kernels.backends import choose_backend

_MEAN = LossConfig(loss_type="pg")  # with advantages of 1: the mean negative log-probability


def run_work(problem: Problem, settings: dict[str, Any], schedule: str = "auto") -> Result:
    """Run any work; ``settings`` are those of ``linear_logprobs`` and ``linear_policy_loss``."""
    if problem.work.kind in ("mean", "loss"):
        return run_loss(problem, {**settings, "schedule": schedule})
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
    """Run a loss forward and backward; ``settings`` are those of ``linear_policy_loss``."""
    loss = policy_loss_of(problem, settings)
    return with_gradients(problem, loss, loss=loss)


def policy_loss_of(problem: Problem, settings: dict[str, Any]) -> Tensor:
    return _call(linear_policy_loss, problem, settings).loss


def _call(function: Callable[..., Any], problem: Problem, settings: dict[str, Any]) -> Any:
    """Call ``linear_policy_loss``, or ``explain`` with the same arguments."""
    mean = problem.work.kind == "mean"
    if mean:
        problem = replace(problem, advantages=torch.ones_like(problem.advantages))
    config, softcap = _MEAN if mean else problem.loss, problem.softcap
    arguments = problem.hidden, problem.weight, problem.batch(), config
    return function(*arguments, softcap=softcap, **settings)


def _losses(case: Case) -> str | None:
    return None if case.work.kind in ("mean", "loss") else "the same as ours: it has no schedule"


def _chosen_by_ours(problem: Problem) -> str | None:
    plan = _call(explain, problem, {})
    if plan.schedule == "one_pass":
        return "the same as ours: it is what ours chooses"
    return plan.why_two_passes


def _unless_default(name: str) -> Callable[[str], str | None]:
    def missing(device: str) -> str | None:
        default = choose_backend("auto", torch.device(device), torch.float32).name
        return f"it is what ours runs on {device}" if name == default else None

    return missing


def _provider(name: str, note: str, schedule: str = "auto", **rest: Any) -> Provider:
    settings = {key: rest.pop(key) for key in ("precision", "backend") if key in rest}

    def info(problem: Problem) -> dict[str, Any]:
        if problem.work.kind in ("forward", "backward"):
            return {}
        return {"schedule": _call(explain, problem, {**settings, "schedule": schedule}).schedule}

    def run(problem: Problem) -> Result:
        return run_work(problem, settings, schedule)

    return Provider(name=name, note=note, run=run, info=info, **rest)


OURS_ALL = (
    _provider("ours", "the defaults: unrounded fp32 logits"),
    _provider(
        "ours-input",
        'precision="input": logits rounded to the input dtype, as most baselines do',
        precision="input",
        unable=lambda case: (
            None if case.dtype == "bf16" else "the same as ours: nothing is rounded"
        ),
    ),
    _provider(
        "ours-one-pass",
        'schedule="one_pass": gradients in the forward; where ours chooses two_pass',
        "one_pass",
        unable=_losses,
        redundant=_chosen_by_ours,
    ),
    _provider(
        "ours-two-pass",
        'schedule="two_pass": the backward recomputes the logits',
        "two_pass",
        unable=_losses,
    ),
    _provider(
        "ours-chunked",
        'backend="chunked": row passes in torch',
        backend="chunked",
        missing=_unless_default("chunked"),
    ),
    _provider(
        "ours-reference",
        'backend="reference": full fp32 logits',
        backend="reference",
        missing=_unless_default("reference"),
    ),
)
