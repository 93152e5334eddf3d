"""This package: its backends, precisions, schedules, backwards, and skipped work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import reference
from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider, behind_queue, with_gradients
from benchmarks.shapes import WORKS, Case
from grpo_kernels import (
    Bounded,
    HeadLoRA,
    LossConfig,
    explain,
    linear_divergence,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import choose_backend

_MEAN = LossConfig(loss_type="pg")  # with advantages of 1: the mean negative log-probability
_RANK, _SCALING = 16, 2.0
_UPDATE = 0.02  # standard deviation of the adapter's part of a logit


def run(problem: Problem, **settings: Any) -> Result:
    """Run any work, with settings of ``linear_logprobs`` or ``linear_policy_loss``."""
    work = problem.work
    if work.kind in ("mean", "loss"):
        loss = _call(linear_policy_loss, problem, settings).loss
        return with_gradients(problem, loss, loss=loss)
    if work.kind == "divergence":
        inputs = problem.hidden.flatten(0, 1), problem.weight, *(problem.teacher or ())
        loss = linear_divergence(*inputs, kind=work.name).loss
        return with_gradients(problem, loss, loss=loss)
    outputs = ("logprobs", "entropy") if work.entropy else ("logprobs",)
    with torch.set_grad_enabled(work.kind == "backward"):
        out = _logprobs(problem, outputs=outputs, **settings)
    if work.kind == "forward":
        return Result(logprobs=out.logprobs, entropy=out.entropy)
    return with_gradients(problem, out.logprobs, problem.dlogprobs, logprobs=out.logprobs)


def _logprobs(problem: Problem, **settings: Any) -> Any:
    inputs = problem.hidden, problem.weight, problem.target
    return linear_logprobs(*inputs, softcap=problem.softcap, **settings)


def _call(function: Callable[..., Any], problem: Problem, settings: dict[str, Any]) -> Any:
    """Call ``linear_policy_loss``, or ``explain`` with the same arguments."""
    config = _MEAN
    if problem.work.kind == "mean":
        problem = replace(problem, advantages=torch.ones_like(problem.advantages))
    else:
        config = problem.loss
    arguments = problem.hidden, problem.weight, problem.batch(), config
    return function(*arguments, softcap=problem.softcap, **settings)


def _schedule(problem: Problem, **settings: Any) -> dict[str, Any]:
    if _no_schedule(problem.case):
        return {}
    return {"schedule": _call(explain, problem, settings).schedule}


def _no_schedule(case: Case) -> bool:
    return case.work.kind in ("forward", "backward", "divergence")


def _chosen_by_ours(problem: Problem) -> str | None:
    plan = _call(explain, problem, {})
    if plan.schedule == "one_pass":
        return "the same as ours, which chooses it"
    return plan.why_two_passes


def _default(backend: str, device: str) -> str | None:
    default = choose_backend("auto", torch.device(device), torch.float32).name
    return f"ours uses it on {device}" if backend == default else None


def _ours(name: str, note: str, settings: dict[str, Any], **rest: Any) -> Provider:
    if "backend" in settings:
        rest["missing"] = partial(_default, settings["backend"])
    if "schedule" in settings:
        rest["limits"] = (("the same as ours: the work has no schedule", _no_schedule),)
    info = partial(_schedule, **settings)
    rest["default"] = not settings
    return Provider(name=name, note=note, run=partial(run, **settings), info=info, **rest)


OURS = (
    _ours("ours", "our defaults, with unrounded fp32 logits", {}),
    _ours(
        "ours-input",
        'precision="input", which rounds logits to the input dtype, as most baselines do',
        {"precision": "input"},
        limits=(("the same as ours: nothing is rounded", lambda case: case.dtype == "fp32"),),
    ),
    _ours(
        "ours-one-pass",
        'schedule="one_pass": gradients in the forward; shown if ours chooses two_pass',
        {"schedule": "one_pass"},
        redundant=_chosen_by_ours,
    ),
    _ours(
        "ours-two-pass",
        'schedule="two_pass": the backward computes the logits again',
        {"schedule": "two_pass"},
    ),
    behind_queue(_ours("ours", "", {})),
    _ours("ours-chunked", 'backend="chunked", with row passes in torch', {"backend": "chunked"}),
    _ours("ours-reference", 'backend="reference", with full fp32 logits', {"backend": "reference"}),
)


def _entries(problem: Problem, backward: Bounded) -> dict[str, Any]:
    """Return how many entries rows keep, and the share of rows that are exact."""
    if problem.work.kind != "backward":
        return {}
    out = _logprobs(problem, backward=backward, outputs=("logprobs", "entries"))
    found = out.entries.flatten().tolist()
    kept = [count for count in found if count >= 0]  # -1: the row is exact
    exact = 1 - len(kept) / len(found)
    return {"entries": [fmean(kept), max(kept)] if kept else [], "exact_share": exact}


def _sparse(name: str, **settings: Any) -> Provider:
    backward = Bounded(**settings)
    words = ", ".join(f"{name}={value}" for name, value in settings.items())
    return Provider(
        name=f"ours-{name}",
        note=f"backward=Bounded({words})" if settings else 'backward="sparse"',
        run=partial(run, backward=backward),
        info=partial(_entries, backward=backward),
        tolerance=backward.tolerance,
    )


BACKWARDS = (
    Provider(
        name="ours-again",
        note="activation_bytes=0: the op keeps nothing, and its backward computes the logits again",
        run=partial(run, activation_bytes=0),
    ),
    Provider(
        name="ours-kept",
        note="the op keeps what its backward needs, without rounding: dhidden by default, or the "
        "logits' gradient with activation_bytes",
        run=partial(run, activation_bytes=1 << 60),
    ),
    _sparse("sparse-hidden"),
    _sparse("sparse", exact_weight=False),
    _sparse("sparse-1e-2", exact_weight=False, tolerance=1e-2),
    _sparse("sparse-1e-3", exact_weight=False, tolerance=1e-3),
)


def _run_adapted(problem: Problem) -> Result:
    """Compute the loss and its gradients, for the adapter's factors instead of the weight."""
    lora = _adapter(problem.hidden, problem.weight)
    loss = _call(linear_policy_loss, problem, {"lora": lora}).loss
    dhidden, da, db = torch.autograd.grad(loss, (problem.hidden, lora.a, lora.b))
    return Result(loss=loss.detach(), dhidden=dhidden, dweight=_flat(da, db))


def _exact_adapted(problem: Problem) -> tuple[Problem, Result]:
    """Return the problem with the adapter merged into the weight, and its exact results."""
    lora = _adapter(problem.hidden, problem.weight)
    a, b = lora.a.detach(), lora.b.detach()
    weight = (problem.weight.detach().float() + lora.scaling * (b @ a)).requires_grad_()
    work = WORKS[problem.work.name.removesuffix("-frozen")]
    merged = replace(problem, case=replace(problem.case, work=work), weight=weight)
    exact = reference(merged)
    dweight = exact.dweight
    assert dweight is not None
    a, b = a.to(dweight), b.to(dweight)
    gradients = _flat(lora.scaling * (b.t() @ dweight), lora.scaling * (dweight @ a.t()))
    return merged, replace(exact, dweight=gradients)


def _flat(da: Tensor, db: Tensor) -> Tensor:
    return torch.cat([da.flatten(), db.flatten()])


@lru_cache(maxsize=1)
def _adapter(hidden: Tensor, weight: Tensor) -> HeadLoRA:
    """Make factors in fp32, as PEFT keeps them."""
    generator = torch.Generator().manual_seed(2)

    def factor(shape: tuple[int, int], std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(weight.device).requires_grad_()

    # rows of hidden states are about equally long: their norm determines the size of the update
    a = factor((_RANK, weight.shape[1]), 1 / hidden.detach().float().norm(dim=-1).mean().item())
    b = factor((weight.shape[0], _RANK), _UPDATE / (_SCALING * _RANK**0.5))
    return HeadLoRA(a=a, b=b, scaling=_SCALING)


def _variant(name: str, base: str, note: str, run: Any = run, **rest: Any) -> Provider:
    """Return a variant with a time relative to the variant ``base``."""
    info = {"base": f"ours, {base}"} if base else {}
    return Provider(name=f"ours, {name}", note=note, run=run, info=lambda problem: info, **rest)


# one loss on one batch with more or less to do, and its work
VARIANTS = {
    _variant("all", "", "every token has a gradient"): "dapo",
    _variant("masked", "all", "half of the tokens masked"): "dapo-masked",
    _variant(
        "zero",
        "all",
        'half of the tokens at zero advantage, metric_rows="all": they need only the forward',
    ): "dapo-zero",
    _variant(
        "zero-active",
        "all",
        'half of the tokens at zero advantage, metric_rows="active": they cost nothing',
        partial(run, metric_rows="active"),
    ): "dapo-zero",
    _variant("frozen", "all", "the head is frozen"): "dapo-frozen",
    _variant(
        "lora",
        "frozen",
        f"the head is frozen, with LoRA of rank {_RANK} in fp32",
        _run_adapted,
        exact=_exact_adapted,
    ): "dapo-frozen",
}
