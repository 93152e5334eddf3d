"""``grpo-kernels check``: values and gradients of every backend on this machine, against fp64.

The limit is the same as in the tests: at most twice the error of eager PyTorch at the same dtype.
Before that come GEMMs of the libraries, with inputs for which the result is known bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import testing
from grpo_kernels.backends import BACKENDS, output_view
from grpo_kernels.head import (
    Head,
    accumulate,
    leading_dim,
    matmul_precision,
    project,
    stats_dtype,
    zero_row_padding,
)
from grpo_kernels.linear_logprobs import linear_logprobs
from grpo_kernels.losses import LossConfig
from grpo_kernels.testing import Problem, make_problem, poisoned_allocations, relative_error
from grpo_kernels.tools.machine import device_types

# Errors that always pass, relative to the largest element: of values, and of gradients. In 16 bits
# that is 1.5 units in the last place: the gradient of the logits is rounded (truncated by Triton's
# interpreter), and so is its GEMM.
_FLOORS = {
    torch.float32: (1e-5, 3e-6),
    torch.bfloat16: (1e-5, 1.5 * 2**-7),
    torch.float16: (1e-5, 1.5 * 2**-10),
    torch.float64: (1e-12, 1e-12),
}
DTYPES = tuple(_FLOORS)
_EAGER_SLACK = 10  # eager PyTorch itself may be off by this many floors


class _Shape(NamedTuple):
    sequences: int
    length: int
    hidden: int
    vocabulary: int
    tile_rows: int

    def problem(self, device: torch.device, dtype: torch.dtype) -> Problem:
        made = make_problem(self.sequences, self.length, self.hidden, self.vocabulary)
        return made.to(device, dtype)


_SHAPES = (
    _Shape(1, 1, 5, 1, tile_rows=1),
    _Shape(4, 7, 16, 53, tile_rows=8),  # several tiles; the third sequence is masked entirely
    # several tiles of columns, but few enough elements for one thread
    _Shape(3, 3, 40, 2503, tile_rows=9),
)
# (C, V, D): odd K, K that is not a multiple of 64, few rows, odd vocabularies
_GEMMS = [(1, 257, 17), (7, 1000, 96), (33, 2503, 41), (200, 4099, 130)]
# Split-K GEMMs, which a GPU's library uses for a long K and a small result: dhidden of a real head
# for a few rows, and for a chunk.
_LARGE_GEMMS = [(7, 151665, 2048), (1000, 50257, 896), (2000, 151665, 896)]

Results = dict[str, Tensor]
LEGEND = """\
This runs for about a minute.
error: difference from fp64, relative to the largest element; the worst of several shapes.
library: torch's matrix multiplications, on numbers with exact sums; no error is allowed."""
LINE = "{:<10} {:<6} {:<8} {:<39} {:>8} {:>8}  {}"


class _Result(NamedTuple):
    """The result of a check."""

    error: float = 0.0
    allowed: float = 0.0
    failure: str | None = None  # what is wrong, if there is no error to report


def outcomes() -> Iterator[tuple[bool, str]]:
    """Run every check that this machine can run; yield whether it passed, and its line.

    A line reports the worst of several shapes and outputs.
    """
    for device in map(torch.device, device_types()):
        for dtype in DTYPES:
            check = partial(_gemms, device, dtype)
            yield _outcome("library", device, dtype, "GEMMs of a step", check=check)
        for (name, backend), dtype in product(BACKENDS.items(), DTYPES):
            if backend.unavailable() or backend.unsuited(device, dtype):
                continue
            for what in _RUNS:
                check = partial(_worst, name, what, device, dtype)
                yield _outcome(name, device, dtype, what, check=check)


def _outcome(
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    what: str,
    *,
    check: Callable[[], _Result],
) -> tuple[bool, str]:
    try:
        result = check()
    except Exception as problem:  # shown to the user, to report
        message = str(problem).strip().splitlines()[:1]
        result = _Result(failure=": ".join([type(problem).__name__, *message]))
    ok = result.failure is None and result.error <= result.allowed
    error, allowed = f"{result.error:.1e}", f"{result.allowed:.1e}"
    verdict = "ok" if ok else "FAILED"
    if result.failure is not None:
        error = allowed = "-"
        verdict = f"FAILED: {result.failure}"
    name = str(dtype).removeprefix("torch.")
    return ok, LINE.format(backend, device.type, name, what, error, allowed, verdict)


def _gemms(device: torch.device, dtype: torch.dtype) -> _Result:
    large = device.type == "cuda" and dtype != torch.float64
    shapes = _GEMMS + _LARGE_GEMMS if large else _GEMMS
    wrong = (line for shape in shapes for line in wrong_gemms(device, dtype, shape))
    return _Result(failure=next(wrong, None))


def wrong_gemms(
    device: torch.device,
    dtype: torch.dtype,  # of the inputs
    shape: tuple[int, int, int],  # (C, V, D): K of dweight, of dhidden and of the logits
) -> Iterator[str]:
    """Yield a line for every GEMM of a step, on a tile of logits, that has a wrong result.

    All inputs are 1 or -1, so sums are exact as far as the dtype can hold them. A library that
    drops a part of K, or reads beyond a strided row, gives other sums.
    """
    with matmul_precision(device, "fp32"):
        for gemm, result, exact in _products(device, dtype, shape):
            differ = int(torch.ne(result, exact.to(result.dtype)).sum())  # counts NaNs, too
            if differ:
                rows, columns, depth = shape
                where = f"C {rows} V {columns} D {depth}"
                yield f"{gemm}, {where}: {differ} of {result.numel()} sums are wrong"


def _products(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, result and exact result of every GEMM of a step."""
    rows, columns, depth = shape
    generator = torch.Generator(device).manual_seed(0)
    wide = stats_dtype(dtype)

    def unset(height: int, width: int, dtype: torch.dtype) -> Tensor:
        return torch.full((height, width), math.nan, dtype=dtype, device=device)

    def tile(dtype: torch.dtype) -> Tensor:
        return unset(rows, leading_dim(columns, dtype, device), dtype)[:, :columns]

    hidden = unset(rows, depth, dtype)
    weight = unset(columns, depth, dtype)
    # 16 bits of a gradient lie in the first half of each row of a tile
    dlogits = output_view(tile(wide), dtype)
    for x in (hidden, weight, dlogits):
        x.random_(0, 2, generator=generator).mul_(2).sub_(1)
    zero_row_padding(dlogits)
    factors = {"dhidden": (dlogits, weight), "dweight": (dlogits.t(), hidden)}
    for out in dict.fromkeys((wide, dtype)):
        words = "" if out == wide else " of 16 bits"
        logits = project(hidden, Head(weight), tile(out))
        yield f"logits{words}", logits, hidden.double() @ weight.double().t()
        for name, (a, b) in factors.items():
            sums = unset(len(a), depth, out)
            accumulate(sums, a, b, first=True)
            yield f"{name}{words}", sums, a.double() @ b.double()
    sums = torch.full_like(weight, 3.0, dtype=wide)
    accumulate(sums, dlogits.t(), hidden, first=False)
    yield "dweight, added", sums, 3 + dlogits.t().double() @ hidden.double()


def _worst(backend: str, what: str, device: torch.device, dtype: torch.dtype) -> _Result:
    """Return the error that is largest relative to its limit."""
    errors = []
    for shape in _SHAPES:
        exact = _eager(what, shape, torch.device("cpu"), torch.float64)
        eager = _eager(what, shape, device, dtype)
        tile = shape.tile_rows * shape.vocabulary * max(4, dtype.itemsize)
        problem = shape.problem(device, dtype)
        with poisoned_allocations():
            results = _RUNS[what](problem, backend=backend, max_workspace_bytes=tile)
        for name, value in results.items():
            floor = _FLOORS[dtype][name.startswith("d")]
            allowed = max(2 * relative_error(eager[name], exact[name]), floor)
            # the limit that eager's error sets must not exceed a fixed bound
            allowed = min(allowed, _EAGER_SLACK * floor)
            errors.append(_Result(relative_error(value, exact[name]), allowed))
    return max(errors, key=lambda each: each.error / each.allowed)


@cache
def _eager(what: str, shape: _Shape, device: torch.device, dtype: torch.dtype) -> Results:
    return _RUNS[what](shape.problem(device, dtype), backend="reference")


def _logprobs(problem: Problem, **options: Any) -> Results:
    out = linear_logprobs(
        problem.hidden,
        problem.weight,
        torch.where(problem.mask, problem.target, -100),
        bias=problem.bias,
        temperature=0.7,
        softcap=5.0,
        outputs=("logprobs", "entropy"),
        **options,
    )
    assert out.logprobs is not None and out.entropy is not None and problem.bias is not None
    total = (out.logprobs.double().sin() + 0.3 * out.entropy.double()).sum()
    leaves = [problem.hidden, problem.weight, problem.bias]
    dhidden, dweight, dbias = torch.autograd.grad(total, leaves)
    gradients = {"dhidden": dhidden, "dweight": dweight, "dbias": dbias}
    return {"logprobs": out.logprobs, "entropy": out.entropy, **gradients}


def _loss(config: LossConfig, problem: Problem, **options: Any) -> Results:
    results = testing.run(problem, config, **options)
    return {name: results[name] for name in ("loss", "dhidden", "dweight", "dbias")}


_DAPO = LossConfig(loss_type="dapo", beta=0.05, temperature=0.8)
_GSPO = LossConfig(loss_type="gspo", temperature=0.8)
_SAPO = LossConfig(loss_type="sapo", entropy_coef=0.01)
_RUNS: dict[str, Callable[..., Results]] = {  # called with a problem and options of the function
    "linear_logprobs": _logprobs,
    "linear_policy_loss: dapo": partial(_loss, _DAPO),
    "linear_policy_loss: dapo, two_pass": partial(_loss, _DAPO, schedule="two_pass"),
    "linear_policy_loss: gspo": partial(_loss, _GSPO),
    "linear_policy_loss: sapo, entropy bonus": partial(_loss, _SAPO),
}
