"""``grpo-kernels check``: values and gradients of every backend on this machine, against fp64.

The yardstick is that of the tests: at most twice the error of eager PyTorch at the same dtype.
Before them come the libraries' GEMMs, whose canaries have to be right to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import testing
from grpo_kernels.backends import BACKENDS
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.losses import LossConfig
from grpo_kernels.testing import Problem, make_problem, poisoned_allocations, relative_error
from grpo_kernels.tools.canaries import Shape, gemm_canaries
from grpo_kernels.tools.machine import device_types

# Errors that count as exact, relative to the largest element: of values, and of gradients. In 16
# bits these are one and a half units of the last place: the gradient of the logits is rounded
# (Triton's interpreter cuts it off), and so is the GEMM with it.
_FLOORS = {
    torch.float32: (1e-5, 3e-6),
    torch.bfloat16: (1e-5, 1.5 * 2**-7),
    torch.float16: (1e-5, 1.5 * 2**-10),
    torch.float64: (1e-12, 1e-12),
}
DTYPES = tuple(_FLOORS)
_EAGER_SLACK = 10  # times this is what eager PyTorch itself may be off by

# (sequences, length, hidden size, vocabulary), the rows of a tile
_SHAPES = (
    ((1, 1, 5, 1), 1),
    ((4, 7, 16, 53), 8),  # several tiles; the third sequence is wholly masked
    ((3, 3, 40, 2503), 9),  # several tiles of columns, few enough elements for one thread
)
# Odd K, K that are no multiples of 64, few rows, odd vocabularies
_GEMMS = (Shape(1, 257, 17), Shape(7, 1000, 96), Shape(33, 2503, 41), Shape(200, 4099, 130))
# A GPU's library cuts a long K into parts that it sums apart, where the result is small: dhidden of
# a few rows of a real head, and of a chunk.
_LARGE_GEMMS = (Shape(7, 151665, 2048), Shape(1000, 50257, 896), Shape(2000, 151665, 896))
_LARGE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Results = dict[str, Tensor]
Run = Callable[[Problem, str, int | None], Results]  # problem, backend, tile bytes


@dataclass(frozen=True)
class Outcome:
    """One line: the worst of several shapes and outputs."""

    backend: str
    device: str
    dtype: str
    what: str
    error: float = float("inf")
    allowed: float = 0.0
    failure: str | None = None  # an exception or a wrong canary stands in place of the error

    @property
    def ok(self) -> bool:
        return self.failure is None and self.error <= self.allowed


def outcomes() -> Iterator[Outcome]:
    """Yield every check that this machine can run, one after the other."""
    for device in map(torch.device, device_types()):
        for dtype in DTYPES:
            yield _outcome(_gemms, "library", device, dtype, "GEMMs of a step")
        for backend in BACKENDS.values():
            for dtype in DTYPES:
                if (backend.unavailable() or backend.unsuited(device, dtype)) is None:
                    for what in _RUNS:
                        yield _outcome(_worst, backend.name, device, dtype, what)


def _outcome(
    check: Callable[..., tuple], backend: str, device: torch.device, dtype: torch.dtype, what: str
) -> Outcome:
    """Run a check, which returns error, bound and failure."""
    labels = (backend, device.type, str(dtype).removeprefix("torch."), what)
    try:
        return Outcome(*labels, *check(backend, device, dtype, what))
    except Exception as problem:  # it is what the user has to report
        line = str(problem).strip().splitlines()[:1]
        return Outcome(*labels, failure=": ".join([type(problem).__name__, *line]))


def _gemms(
    backend: str, device: torch.device, dtype: torch.dtype, what: str
) -> tuple[float, float, str | None]:
    """Run the canaries of the library that multiplies ``dtype`` on ``device``."""
    large = _LARGE_GEMMS if device.type == "cuda" and dtype in _LARGE_DTYPES else ()
    for shape in (*_GEMMS, *large):
        for found in gemm_canaries(device, dtype, shape):
            if not found.ok:
                wrong = f"{found.gemm}, {shape}: expected {found.expected}, got {found.came}"
                return 0.0, 0.0, wrong
    return 0.0, 0.0, None


def _worst(
    backend: str, device: torch.device, dtype: torch.dtype, what: str
) -> tuple[float, float]:
    """Return the error that is nearest to its bound, or farthest over it."""
    pairs = []
    for shape, rows in _SHAPES:
        exact = _eager(what, shape, torch.device("cpu"), torch.float64)
        eager = _eager(what, shape, device, dtype)
        problem = make_problem(*shape).to(device, dtype)
        with poisoned_allocations():
            got = _RUNS[what](problem, backend, rows * shape[-1] * max(4, dtype.itemsize))
        for name, value in got.items():
            floor = _FLOORS[dtype][name.startswith("d")]
            # eager itself, and so what it excuses, is held to a fixed bound
            allowed = max(2 * relative_error(eager[name], exact[name]), floor)
            bound = min(allowed, _EAGER_SLACK * floor)
            pairs.append((relative_error(value, exact[name]), bound))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


@functools.cache
def _eager(what: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Results:
    return _RUNS[what](make_problem(*shape).to(device, dtype), "reference", None)


def _logprobs(problem: Problem, backend: str, tile: int | None) -> Results:
    out = linear_logprobs(
        problem.hidden,
        problem.weight,
        torch.where(problem.mask, problem.target, -100),
        bias=problem.bias,
        temperature=0.7,
        softcap=5.0,
        outputs=("logprobs", "entropy"),
        backend=backend,
        max_workspace_bytes=tile,
    )
    assert out.logprobs is not None and out.entropy is not None
    total = (out.logprobs.double().sin() + 0.3 * out.entropy.double()).sum()
    found = torch.autograd.grad(total, [problem.hidden, problem.weight, problem.bias])
    gradients = dict(zip(("dhidden", "dweight", "dbias"), found, strict=True))
    return {"logprobs": out.logprobs, "entropy": out.entropy, **gradients}


def _loss(schedule: str, settings: dict[str, Any]) -> Run:
    def run(problem: Problem, backend: str, tile: int | None) -> Results:
        how: dict[str, Any] = dict(backend=backend, schedule=schedule, max_workspace_bytes=tile)
        got = testing.run(problem, LossConfig(**settings), **how)
        return {"loss": got.loss, **got.gradients}

    return run


_DAPO = dict(loss_type="dapo", beta=0.05, temperature=0.8)
_RUNS: dict[str, Run] = {
    "linear_logprobs": _logprobs,
    "linear_policy_loss: dapo": _loss("auto", _DAPO),
    "linear_policy_loss: dapo, two_pass": _loss("two_pass", _DAPO),
    "linear_policy_loss: gspo": _loss("auto", dict(loss_type="gspo", temperature=0.8)),
    "linear_policy_loss: sapo, entropy bonus": _loss(
        "auto", dict(loss_type="sapo", entropy_coef=0.01)
    ),
}
