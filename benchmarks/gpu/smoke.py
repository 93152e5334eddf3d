"""What machine this is, and whether every kind of call gives the reference's results at all."""

from __future__ import annotations

import importlib.metadata as metadata
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.environment import environment
from benchmarks.gpu.notes import Notes
from grpo_kernels import linear_logprobs
from grpo_kernels.testing import Problem, make_config, make_problem, relative_error, run

_LIBRARIES = ("nvidia-cublas", "nvidia-cublas-cu12", "peft", "pytest", "pytest-benchmark")
# errors that are no defect: roundings of the last digit. Triton's interpreter truncates bf16.
_FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# dtype and schedule of a loss
_LOSSES = (
    (torch.bfloat16, "one_pass"),
    (torch.bfloat16, "two_pass"),
    (torch.float32, "one_pass"),
    (torch.float32, "two_pass"),
    (torch.float16, "one_pass"),
)
_SIZES = {False: (4, 128, 512, 1000), True: (2, 3, 16, 21)}
_OUTPUTS = ("logprobs", "entropy")

Call = Callable[..., Mapping[str, Tensor]]  # of a problem and a backend


def smoke(notes: Notes, small: bool) -> None:
    """Run each kind of call twice: the first one compiles."""
    _facts(notes)
    problem = make_problem(*_SIZES[small])
    kinds: list[tuple[str, torch.dtype, Call]] = [
        (f"loss {_name(dtype)} {schedule}", dtype, partial(_loss, schedule=schedule))
        for dtype, schedule in _LOSSES
    ]
    kinds += [(f"log-probabilities {_name(dtype)}", dtype, _values) for dtype in _FLOORS]
    notes.every(
        (name, partial(_compare, notes, name, problem, dtype, call)) for name, dtype, call in kinds
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _facts(notes: Notes) -> None:
    facts = environment(notes.device.type)
    versions = {name: value for name, value in facts.pop("versions").items() if value}
    notes.number("machine", **facts)
    notes.number("versions", **versions, **_installed())
    if notes.device.type == "cuda":
        notes.number("device", properties=str(torch.cuda.get_device_properties(notes.device)))


def _installed() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _loss(
    problem: Problem, schedule: str = "auto", backend: str = "triton"
) -> Mapping[str, Tensor]:
    schedule = "auto" if backend == "reference" else schedule
    found = run(problem, make_config("dapo", beta=0.05), schedule=schedule, backend=backend)
    return {"loss": found.loss, **found.gradients}


def _values(problem: Problem, backend: str = "triton") -> Mapping[str, Tensor]:
    with torch.no_grad():
        found = linear_logprobs(
            problem.hidden, problem.weight, problem.target,
            bias=problem.bias, outputs=_OUTPUTS, backend=backend,
        )  # fmt: skip
    return {name: getattr(found, name) for name in _OUTPUTS}


def _compare(
    notes: Notes,
    name: str,
    problem: Problem,
    dtype: torch.dtype,
    call: Call,
) -> None:
    """Compare with fp64; the error may be twice that of the reference in the same dtype."""
    exact = call(problem, backend="reference")
    posed = problem.to(notes.device, dtype)
    eager = call(posed, backend="reference")
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        got = call(posed)
        total = sum(float(x.sum()) for x in got.values())  # waits for the device
        seconds.append(time.perf_counter() - start)
    notes.number(name, first_call_s=seconds[0], second_call_s=seconds[1], checksum=total)
    for each in got:
        own, allowed = (relative_error(x[each], exact[each]) for x in (got, eager))
        allowed = max(2 * allowed, _FLOORS[dtype])
        notes.check(
            f"{name}, {each}", own <= allowed, f"an error up to {allowed:.1e}", f"{own:.1e}"
        )
