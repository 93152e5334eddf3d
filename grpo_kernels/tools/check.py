"""``grpo-kernels check``: values and gradients of every backend on this machine, against fp64.

The yardstick is that of the tests: at most twice the error of eager PyTorch at the same dtype.
Before them come the libraries' GEMMs, whose canaries have to be right to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels import testing
from grpo_kernels.backends import BACKENDS
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.losses import LossConfig
from grpo_kernels.testing import Problem, make_problem, poisoned_allocations, relative_error
from grpo_kernels.tools.canaries import Shape, gemm_canaries
from grpo_kernels.tools.machine import device_types

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Errors that count as exact, relative to the largest element: of values, and of gradients. In 16
# bits these are one and a half units of the last place: the gradient of the logits is rounded
# (Triton's interpreter cuts it off), and so is the GEMM with it.
_VALUE_FLOOR = {torch.float64: 1e-12}
_DEFAULT_VALUE_FLOOR = 1e-5
_GRADIENT_FLOOR = {
    torch.float32: 3e-6,
    torch.bfloat16: 1.5 * 2**-7,
    torch.float16: 1.5 * 2**-10,
    torch.float64: 1e-12,
}
_EAGER_SLACK = 10  # times this is what eager PyTorch itself may be off by

# (sequences, length, hidden size, vocabulary), the rows of a tile
_SHAPES = (
    ((1, 1, 5, 1), 1),
    ((4, 7, 16, 53), 8),  # several tiles; the third sequence is wholly masked
    ((3, 3, 40, 2503), 9),  # several tiles of columns, few enough elements for one thread
)
_LOSSES: dict[str, tuple[LossConfig, str]] = {
    "dapo": (LossConfig(loss_type="dapo", beta=0.05, temperature=0.8), "auto"),
    "dapo, two_pass": (LossConfig(loss_type="dapo", beta=0.05, temperature=0.8), "two_pass"),
    "gspo": (LossConfig(loss_type="gspo", temperature=0.8), "auto"),
    "sapo, entropy bonus": (LossConfig(loss_type="sapo", entropy_coef=0.01), "auto"),
}

# Odd K, K that are no multiples of 64, few rows, odd vocabularies
_GEMMS = tuple(
    Shape(rows=rows, columns=columns, depth=depth)
    for rows, columns, depth in ((1, 257, 17), (7, 1000, 96), (33, 2503, 41), (200, 4099, 130))
)
# A GPU's library cuts a long K into parts that it sums apart, where the result is small: dhidden of
# a few rows of a real head, and of a chunk.
_LARGE_GEMMS = tuple(
    Shape(rows=rows, columns=columns, depth=depth)
    for rows, columns, depth in ((7, 151665, 2048), (1000, 50257, 896), (2000, 151665, 896))
)
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
    for device in device_types():
        for dtype in DTYPES:
            yield _check_gemms(torch.device(device), dtype)
        for backend in BACKENDS.values():
            for dtype in DTYPES:
                why_not = backend.unavailable() or backend.unsuited(torch.device(device), dtype)
                if why_not is None:
                    yield from _check(backend.name, device, dtype)


def _check(backend: str, device: str, dtype: torch.dtype) -> Iterator[Outcome]:
    for what in _RUNS:
        labels = (backend, device, str(dtype).removeprefix("torch."), what)
        try:
            error, allowed = _worst(what, backend, device, dtype)
        except Exception as problem:  # it is what the user has to report
            yield Outcome(*labels, failure=_described(problem))
        else:
            yield Outcome(*labels, error, allowed)


def _described(problem: Exception) -> str:
    line = str(problem).strip().splitlines()[:1]
    return ": ".join([type(problem).__name__, *line])


def _check_gemms(device: torch.device, dtype: torch.dtype) -> Outcome:
    """Run the canaries of the library that multiplies ``dtype`` on ``device``."""
    large = _LARGE_GEMMS if device.type == "cuda" and dtype in _LARGE_DTYPES else ()
    try:
        failure = next(_wrong_gemms(device, dtype, (*_GEMMS, *large)), None)
    except Exception as problem:
        failure = _described(problem)
    labels = ("library", device.type, str(dtype).removeprefix("torch."), "GEMMs of a step")
    return Outcome(*labels, error=0.0, failure=failure)


def _wrong_gemms(
    device: torch.device, dtype: torch.dtype, shapes: Sequence[Shape]
) -> Iterator[str]:
    for shape in shapes:
        for found in gemm_canaries(device, dtype, shape):
            if not found.ok:
                yield f"{found.gemm}, {shape}: expected {found.expected}, got {found.came}"


def _worst(what: str, backend: str, device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Return the error that is nearest to its bound, or farthest over it."""
    pairs = [
        pair
        for index in range(len(_SHAPES))
        for pair in _errors(what, index, backend, device, dtype)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _errors(
    what: str, index: int, backend: str, device: str, dtype: torch.dtype
) -> Iterator[tuple[float, float]]:
    exact = _eager(what, index, "cpu", torch.float64)
    eager = _eager(what, index, device, dtype)
    (*_, columns), rows = _SHAPES[index]
    problem = make_problem(*_SHAPES[index][0]).to(device, dtype)
    with poisoned_allocations():
        got = _RUNS[what](problem, backend, rows * columns * max(4, dtype.itemsize))
    for name, value in got.items():
        floor = _GRADIENT_FLOOR[dtype]
        if not name.startswith("d"):
            floor = _VALUE_FLOOR.get(dtype, _DEFAULT_VALUE_FLOOR)
        # eager itself, and so what it excuses, is held to a fixed bound
        bound = _EAGER_SLACK * floor
        allowed = min(max(2 * relative_error(eager[name], exact[name]), floor), bound)
        yield relative_error(value, exact[name]), allowed


@functools.cache
def _eager(what: str, index: int, device: str, dtype: torch.dtype) -> Results:
    problem = make_problem(*_SHAPES[index][0]).to(device, dtype)
    return _RUNS[what](problem, "reference", None)


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
    return {"logprobs": out.logprobs, "entropy": out.entropy, **_gradients(total, problem)}


def _loss(config: LossConfig, schedule: str) -> Run:
    def run(problem: Problem, backend: str, tile: int | None) -> Results:
        got = testing.run(
            problem, config, backend=backend, schedule=schedule, max_workspace_bytes=tile
        )
        return {"loss": got.loss, **got.gradients}

    return run


def _gradients(root: Tensor, problem: Problem) -> Results:
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight, "dbias": problem.bias}
    return dict(zip(leaves, torch.autograd.grad(root, list(leaves.values())), strict=True))


_RUNS: dict[str, Run] = {
    "linear_logprobs": _logprobs,
    **{f"linear_policy_loss: {name}": _loss(*loss) for name, loss in _LOSSES.items()},
}
