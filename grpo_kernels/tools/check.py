"""``grpo-kernels check``: values and gradients of every backend on this machine, against fp64.

The yardstick is that of the tests: at most twice the error of eager PyTorch at the same dtype.
Before them come canaries, GEMMs of the libraries whose results are known to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from typing import Any

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
# C, V, D: odd K, K that are no multiples of 64, few rows, odd vocabularies
_GEMMS = ((1, 257, 17), (7, 1000, 96), (33, 2503, 41), (200, 4099, 130))
# A GPU's library cuts a long K into parts that it sums apart, where the result is small: dhidden of
# a few rows of a real head, and of a chunk.
_LARGE_GEMMS = ((7, 151665, 2048), (1000, 50257, 896), (2000, 151665, 896))

Results = dict[str, Tensor]
Found = tuple[float, float, str | None]  # error, bound, and what is wrong in their place
LEGEND = """\
This takes about a minute.
error: the difference from fp64, relative to the largest element; the worst of several shapes.
library: matrix multiplications of torch, on numbers with exact sums: no error is allowed."""
LINE = "{:<10} {:<6} {:<8} {:<39} {:>8} {:>8}  {}"


def outcomes() -> Iterator[tuple[bool, str]]:
    """Yield of every check that this machine can run whether it passed, and its line.

    A line is the worst of several shapes and outputs.
    """
    for device in map(torch.device, device_types()):
        for dtype in DTYPES:
            yield _outcome("library", device, dtype, "GEMMs of a step", _gemms)
        for (name, backend), dtype in product(BACKENDS.items(), DTYPES):
            if (backend.unavailable() or backend.unsuited(device, dtype)) is None:
                for what in _RUNS:
                    yield _outcome(name, device, dtype, what, partial(_worst, name, what))


def _outcome(
    backend: str, device: torch.device, dtype: torch.dtype, what: str, check: Callable[..., Found]
) -> tuple[bool, str]:
    try:
        error, allowed, failure = check(device, dtype)
    except Exception as problem:  # it is what the user has to report
        line = str(problem).strip().splitlines()[:1]
        error, allowed, failure = 0.0, 0.0, ": ".join([type(problem).__name__, *line])
    ok = failure is None and error <= allowed
    values = [f"{error:.1e}", f"{allowed:.1e}", "ok" if ok else "FAILED"]
    if failure is not None:
        values = ["-", "-", f"FAILED: {failure}"]
    return ok, LINE.format(backend, device.type, str(dtype).removeprefix("torch."), what, *values)


def _gemms(device: torch.device, dtype: torch.dtype) -> Found:
    large = _LARGE_GEMMS if device.type == "cuda" and dtype != torch.float64 else ()
    wrong = (said for shape in (*_GEMMS, *large) for said in wrong_gemms(device, dtype, *shape))
    return 0.0, 0.0, next(wrong, None)


def wrong_gemms(
    device: torch.device,
    dtype: torch.dtype,  # of the inputs
    rows: int,  # C, the K of dweight
    columns: int,  # V, the K of dhidden
    depth: int,  # D, the K of the logits
) -> Iterator[str]:
    """Say of every GEMM of a step, for a tile of logits, whose result is not the expected one.

    Factors are 1 and -1, so that sums are exact, as far as dtypes hold them. A library that drops a
    part of K or reads beyond a strided row gives others.
    """
    with matmul_precision(device, "fp32"):
        for gemm, came, exact in _products(device, dtype, rows, columns, depth):
            differ = int(torch.ne(came, exact.to(came.dtype)).sum())  # NaNs, too
            if differ:
                shape = f"C {rows} V {columns} D {depth}"
                yield f"{gemm}, {shape}: {differ} of {came.numel()} sums are wrong"


def _products(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, depth: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, result and exact result of every GEMM of a step."""
    generator = torch.Generator(device).manual_seed(0)
    wide, full = stats_dtype(dtype), partial(torch.full, fill_value=float("nan"), device=device)

    def tile(dtype: torch.dtype) -> Tensor:
        return full((rows, leading_dim(columns, dtype, device)), dtype=dtype)[:, :columns]

    hidden, weight = (full((n, depth), dtype=dtype) for n in (rows, columns))
    # 16 bits of a gradient lie in the first half of each row of a tile
    dlogits = output_view(tile(wide), dtype)
    for x in (hidden, weight, dlogits):
        x.random_(0, 2, generator=generator).mul_(2).sub_(1)
    zero_row_padding(dlogits)
    for out in dict.fromkeys((wide, dtype)):
        words = "" if out == wide else " of 16 bits"
        logits = project(hidden, Head(weight), tile(out))
        yield f"logits{words}", logits, hidden.double() @ weight.double().t()
        for name, a, b in (("dhidden", dlogits, weight), ("dweight", dlogits.t(), hidden)):
            sums = full((len(a), depth), dtype=out)
            accumulate(sums, a, b, first=True)
            yield f"{name}{words}", sums, a.double() @ b.double()
    sums = full((columns, depth), fill_value=3.0, dtype=wide)
    accumulate(sums, dlogits.t(), hidden, first=False)
    yield "dweight, added", sums, 3 + dlogits.t().double() @ hidden.double()


def _worst(backend: str, what: str, device: torch.device, dtype: torch.dtype) -> Found:
    """Return the error that is nearest to its bound, or farthest over it."""
    pairs = []
    for shape, rows in _SHAPES:
        exact = _eager(what, shape, torch.device("cpu"), torch.float64)
        eager = _eager(what, shape, device, dtype)
        problem = make_problem(*shape).to(device, dtype)
        tile = rows * shape[-1] * max(4, dtype.itemsize)
        with poisoned_allocations():
            got = _RUNS[what](problem, backend=backend, max_workspace_bytes=tile)
        for name, value in got.items():
            floor = _FLOORS[dtype][name.startswith("d")]
            # eager itself, and so what it excuses, is held to a fixed bound
            allowed = max(2 * relative_error(eager[name], exact[name]), floor)
            bound = min(allowed, _EAGER_SLACK * floor)
            pairs.append((relative_error(value, exact[name]), bound))
    return *max(pairs, key=lambda pair: pair[0] / pair[1]), None


@cache
def _eager(what: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Results:
    return _RUNS[what](make_problem(*shape).to(device, dtype), backend="reference")


def _logprobs(problem: Problem, **options: Any) -> Results:
    target = torch.where(problem.mask, problem.target, -100)
    options |= dict(temperature=0.7, softcap=5.0, outputs=("logprobs", "entropy"))
    out = linear_logprobs(problem.hidden, problem.weight, target, bias=problem.bias, **options)
    assert out.logprobs is not None and out.entropy is not None
    total = (out.logprobs.double().sin() + 0.3 * out.entropy.double()).sum()
    assert problem.bias is not None
    found = torch.autograd.grad(total, [problem.hidden, problem.weight, problem.bias])
    gradients = dict(zip(("dhidden", "dweight", "dbias"), found, strict=True))
    return {"logprobs": out.logprobs, "entropy": out.entropy, **gradients}


def _loss(config: LossConfig, problem: Problem, **options: Any) -> Results:
    found = testing.run(problem, config, **options)
    return {name: found[name] for name in ("loss", "dhidden", "dweight", "dbias")}


_DAPO = LossConfig(loss_type="dapo", beta=0.05, temperature=0.8)
_GSPO = LossConfig(loss_type="gspo", temperature=0.8)
_SAPO = LossConfig(loss_type="sapo", entropy_coef=0.01)
_RUNS: dict[str, Callable[..., Results]] = {  # of a problem, with options of the function
    "linear_logprobs": _logprobs,
    "linear_policy_loss: dapo": partial(_loss, _DAPO),
    "linear_policy_loss: dapo, two_pass": partial(_loss, _DAPO, schedule="two_pass"),
    "linear_policy_loss: gspo": partial(_loss, _GSPO),
    "linear_policy_loss: sapo, entropy bonus": partial(_loss, _SAPO),
}
