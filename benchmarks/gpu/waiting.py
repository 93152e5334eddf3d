"""A step under torch's alarm for host synchronizations: with lengths given it waits for nothing."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu.notes import Notes
from benchmarks.measure import describe
from benchmarks.problem import Problem, make_problem
from benchmarks.shapes import MODELS, Case, Model
from benchmarks.work import WORKS
from grpo_kernels import TokenBatch, linear_policy_loss

_SCHEDULES = ("one_pass", "two_pass")
_LOSSES = ("dapo", "dapo-kl", "gspo", "dapo-masked")


def waiting(notes: Notes, small: bool) -> None:
    """Run one step of each loss and schedule; what synchronizes raises, and is named."""
    model = MODELS["tiny"] if small else Model("odd", 896, 50257)
    notes.every(
        (f"{name}, {schedule}", partial(_step, notes, model, name, schedule))
        for name in _LOSSES
        for schedule in _SCHEDULES
    )


def step_of(problem: Problem, schedule: str) -> Callable[[], None]:
    """Return a step, batch included, that is told the lengths of the sequences."""
    lengths = tuple(problem.mask.sum(1).tolist())

    def step() -> None:
        batch = TokenBatch.from_padded(
            problem.target,
            problem.advantages,
            problem.mask,
            old_logprobs=problem.old_logprobs,
            ref_logprobs=problem.ref_logprobs,
            lengths=lengths,
        )
        out = linear_policy_loss(
            problem.hidden, problem.weight, batch, problem.loss, schedule=schedule
        )
        torch.autograd.grad(out.loss, (problem.hidden, problem.weight))

    return step


def _step(notes: Notes, model: Model, name: str, schedule: str) -> None:
    case = Case(model, 1024, "bf16", WORKS[name])
    step = step_of(make_problem(case, notes.device.type), schedule)
    for _ in range(2):  # compiles, and makes workspaces
        step()
    torch.cuda.synchronize()
    came = "nothing"
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        came = f"{describe(error)} at {_place(error)}"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    notes.check(f"{name} {schedule} waits", came == "nothing", "nothing", came)


def _place(error: Exception) -> str:
    """Return the innermost line of the library that an error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "grpo_kernels" in frame.filename] or frames
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}"
