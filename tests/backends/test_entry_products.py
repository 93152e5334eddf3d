"""Products with entries, by every implementation, against dense products in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.entries import Entries
from tests.backends.conftest import KERNELS, Kernels
from tests.backends.problems import BF16, DTYPES, FP16, FP32
from tests.backends.test_entries import dense

ROWS, SLOTS = 37, 23
PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)]


@pytest.fixture(params=["torch", *KERNELS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


@pytest.fixture(params=[1, 8, 17, 128, 899])
def width(request: pytest.FixtureRequest, kernels: Kernels) -> int:
    if kernels.interpreted and request.param not in (17, 899):
        pytest.skip("for the interpreter")
    return min(request.param, kernels.size(899, 300))


@pytest.fixture
def columns(kernels: Kernels) -> int:
    return kernels.size(301, 47)


@pytest.fixture
def made(kernels: Kernels, columns: int) -> Entries:
    """Return random entries: rows of any number of them, none and -1 included."""
    used = torch.randint(0, SLOTS + 1, (ROWS,), dtype=torch.int32)
    used[:4] = torch.tensor([0, -1, SLOTS, 1])
    ids = torch.stack([torch.randperm(columns)[:SLOTS] for _ in range(ROWS)]).int()
    ids[2:] %= 40  # some columns have many, most have none
    values = torch.randn(ROWS, SLOTS)
    unread = torch.arange(SLOTS) >= used[:, None]
    values[unread], ids[unread] = math.nan, 2**31 - 1
    return Entries(*(x.to(kernels.device) for x in (ids, values, used)), *torch.zeros(3, ROWS))


@pytest.fixture
def factor(kernels: Kernels) -> Tensor:
    return torch.randn(ROWS, device=kernels.device)


def matrix(kernels: Kernels, rows: int, width: int, dtype: torch.dtype = FP32) -> Tensor:
    """Return a random matrix with gaps between its rows."""
    return torch.randn(rows, width + 3).to(kernels.device, dtype)[:, :width]


def assert_rounded_once(kernels: Kernels, got: Tensor, exact: Tensor, size: Tensor) -> None:
    """Allow half a unit of the last place, and the sum's rounding in fp32."""
    truncated = kernels.interpreted and got.dtype != FP32  # by the interpreter
    units = 1.0001 if truncated else 0.5001
    allowed = units * torch.finfo(got.dtype).eps * exact.abs() + 2e-6 * size
    allowed += torch.finfo(got.dtype).smallest_normal
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_matmul(kernels, made, factor, columns, width, dtypes):
    weight = matrix(kernels, columns, width, dtypes[0])
    out = matrix(kernels, ROWS, width, dtypes[1]).fill_(math.nan)
    kernels.entries.matmul(made, factor, weight, out)
    kept = made.used >= 0
    coefficients = dense(made, columns) * factor.double()[:, None]
    exact, size = coefficients @ weight.double(), coefficients.abs() @ weight.double().abs()
    assert out[~kept].isnan().all() and (out[made.used == 0] == 0).all()
    assert_rounded_once(kernels, out[kept], exact[kept], size[kept])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_transposed_matmul(kernels, made, factor, columns, width, dtypes, add):
    rows = matrix(kernels, ROWS, width, dtypes[0])
    rows[made.used < 0] = math.nan
    out = matrix(kernels, columns, width, dtypes[1])
    before = out.double() if add else torch.zeros_like(out, dtype=torch.float64)
    if not add:
        out.fill_(math.nan)
    kernels.entries.transposed_matmul(made, factor, rows, out, add)
    coefficients = (dense(made, columns) * factor.double()[:, None]).t()
    known = torch.where(made.used[:, None] >= 0, rows, 0.0).double()
    exact = before + coefficients @ known
    size = before.abs() + coefficients.abs() @ known.abs()
    assert_rounded_once(kernels, out, exact, size)
    empty = (coefficients == 0).all(1)
    assert empty.any() and torch.equal(out[empty].double(), before[empty])


def test_a_factor_of_zero(kernels, made, factor, columns):
    """Such a row adds nothing, and its product is zero."""
    factor[::2] = 0
    weight, rows = matrix(kernels, columns, 9), matrix(kernels, ROWS, 9)
    out = torch.full_like(rows, math.nan)
    kernels.entries.matmul(made, factor, weight, out)
    assert not out[(made.used >= 0) & (factor == 0)].any()
    both, others = torch.zeros_like(weight), torch.zeros_like(weight)
    kernels.entries.transposed_matmul(made, factor, rows, both, add=True)
    without = made._replace(used=torch.where(factor == 0, 0, made.used))
    kernels.entries.transposed_matmul(without, factor, rows, others, add=True)
    assert torch.equal(both, others) and both.any()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_threads(kernels, made, factor, columns, dtype):
    width = kernels.size(1301, 300)
    weight, rows = (matrix(kernels, n, width, dtype) for n in (columns, ROWS))
    results = []
    for threads in (1, 1) if kernels.interpreted else (1, 1, 2, 3):
        torch.set_num_threads(threads)
        out, transposed = torch.zeros_like(rows), torch.zeros_like(weight)
        kernels.entries.matmul(made, factor, weight, out)
        kernels.entries.transposed_matmul(made, factor, rows, transposed, add=False)
        results.append((out, transposed))
    assert all(map(torch.equal, results[0] * (len(results) - 1), sum(results[1:], ())))


def test_matrices_whose_columns_are_apart(kernels, made, factor, columns):
    weight, rows = (torch.randn(n, 19).to(kernels.device) for n in (columns, ROWS))
    near, far = torch.zeros_like(rows), torch.zeros_like(rows.t()).t()
    kernels.entries.matmul(made, factor, weight, near)
    kernels.entries.matmul(made, factor, weight.t().contiguous().t(), far)
    torch.testing.assert_close(near, far)
    near, far = torch.ones_like(weight), torch.ones_like(weight.t()).t()
    kernels.entries.transposed_matmul(made, factor, rows, near, add=True)
    kernels.entries.transposed_matmul(made, factor, rows.t().contiguous().t(), far, add=True)
    torch.testing.assert_close(near, far)


def test_native_leaves_other_dtypes_to_torch(kernels, made, factor, columns):
    if not kernels.native:
        pytest.skip("for the native kernels")
    made, factor = made._replace(values=made.values.double()), factor.double()
    weight, out = torch.randn(columns, 5).double(), torch.zeros(ROWS, 5).double()
    kernels.entries.matmul(made, factor, weight, out)
    exact = (dense(made, columns) * factor[:, None]) @ weight
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
