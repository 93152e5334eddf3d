"""Products with entries, by every implementation, against dense products in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpu.entries import NativeEntries
from grpo_kernels.backends.entries import Entries
from tests.backends.conftest import CPU, EntriesTarget
from tests.backends.test_entries import dense
from tests.support.linear_problems import BF16, DTYPES, FP16, FP32, ISAS

ROWS, SLOTS = 37, 23
PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)]


@pytest.fixture(params=[1, 8, 17, 128, 899])
def width(request: pytest.FixtureRequest, entries: EntriesTarget) -> int:
    if entries.interpreted and request.param not in (17, 899):
        pytest.skip("for the interpreter")
    return min(request.param, entries.size(899, 300))


def columns_of(entries: EntriesTarget) -> int:
    return entries.size(301, 47)


def made_up(device: torch.device, columns: int) -> Entries:
    """Return random entries: rows of any number of them, none and -1 included."""
    used = torch.randint(0, SLOTS + 1, (ROWS,), dtype=torch.int32)
    used[:4] = torch.tensor([0, -1, SLOTS, 1])
    ids = torch.stack([torch.randperm(columns)[:SLOTS] for _ in range(ROWS)]).int()
    ids[2:] %= 40  # some columns have many, most have none
    values = torch.randn(ROWS, SLOTS)
    unread = torch.arange(SLOTS) >= used[:, None]
    values[unread], ids[unread] = math.nan, 2**31 - 1
    return Entries(*(x.to(device) for x in (ids, values, used)), *torch.zeros(3, ROWS))


def matrix(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a random matrix with gaps between its rows."""
    return torch.randn(rows, width + 3).to(device, dtype)[:, :width]


def assert_rounded_once(entries: EntriesTarget, got: Tensor, exact: Tensor, size: Tensor) -> None:
    """Allow half a unit of the last place, and the sum's rounding in fp32."""
    truncated = entries.interpreted and got.dtype != FP32  # by the interpreter
    units = 1.0001 if truncated else 0.5001
    allowed = units * torch.finfo(got.dtype).eps * exact.abs() + 2e-6 * size
    allowed += torch.finfo(got.dtype).smallest_normal
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_matmul(entries, width, dtypes):
    columns = columns_of(entries)
    made, factor = made_up(entries.device, columns), torch.randn(ROWS, device=entries.device)
    weight = matrix(columns, width, dtypes[0], entries.device)
    out = matrix(ROWS, width, dtypes[1], entries.device).fill_(math.nan)
    entries.kernels.matmul(made, factor, weight, out)
    kept = made.used >= 0
    coefficients = dense(made, columns) * factor.double()[:, None]
    exact, size = coefficients @ weight.double(), coefficients.abs() @ weight.double().abs()
    assert out[~kept].isnan().all() and (out[made.used == 0] == 0).all()
    assert_rounded_once(entries, out[kept], exact[kept], size[kept])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_transposed_matmul(entries, width, dtypes, add):
    columns = columns_of(entries)
    made, factor = made_up(entries.device, columns), torch.randn(ROWS, device=entries.device)
    rows = matrix(ROWS, width, dtypes[0], entries.device)
    rows[made.used < 0] = math.nan
    out = matrix(columns, width, dtypes[1], entries.device)
    before = out.double() if add else torch.zeros_like(out, dtype=torch.float64)
    if not add:
        out.fill_(math.nan)
    entries.kernels.transposed_matmul(made, factor, rows, out, add)
    coefficients = (dense(made, columns) * factor.double()[:, None]).t()
    known = torch.where(made.used[:, None] >= 0, rows, 0.0).double()
    exact = before + coefficients @ known
    size = before.abs() + coefficients.abs() @ known.abs()
    assert_rounded_once(entries, out, exact, size)
    empty = (coefficients == 0).all(1)
    assert empty.any() and torch.equal(out[empty].double(), before[empty])


def test_a_factor_of_zero(entries):
    """Such a row adds nothing, and its product is zero."""
    columns = columns_of(entries)
    made, factor = made_up(entries.device, columns), torch.randn(ROWS, device=entries.device)
    factor[::2] = 0
    weight, rows = matrix(columns, 9, FP32, entries.device), matrix(ROWS, 9, FP32, entries.device)
    out = torch.full_like(rows, math.nan)
    entries.kernels.matmul(made, factor, weight, out)
    assert not out[(made.used >= 0) & (factor == 0)].any()
    both, others = torch.zeros_like(weight), torch.zeros_like(weight)
    entries.kernels.transposed_matmul(made, factor, rows, both, add=True)
    without = made._replace(used=torch.where(factor == 0, 0, made.used))
    entries.kernels.transposed_matmul(without, factor, rows, others, add=True)
    assert torch.equal(both, others) and both.any()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_for_any_threads(entries, dtype):
    columns = columns_of(entries)
    made, factor = made_up(entries.device, columns), torch.randn(ROWS, device=entries.device)
    width = entries.size(1301, 300)
    weight = matrix(columns, width, dtype, entries.device)
    rows = matrix(ROWS, width, dtype, entries.device)
    results = []
    for threads in (1, 1) if entries.interpreted else (1, 1, 2, 3):
        torch.set_num_threads(threads)
        out, transposed = torch.zeros_like(rows), torch.zeros_like(weight)
        entries.kernels.matmul(made, factor, weight, out)
        entries.kernels.transposed_matmul(made, factor, rows, transposed, add=False)
        results.append((out, transposed))
    assert all(map(torch.equal, results[0] * (len(results) - 1), sum(results[1:], ())))


def test_matrices_whose_columns_are_apart(entries):
    columns = columns_of(entries)
    made, factor = made_up(entries.device, columns), torch.randn(ROWS, device=entries.device)
    weight, rows = torch.randn(columns, 19), torch.randn(ROWS, 19)
    weight, rows = weight.to(entries.device), rows.to(entries.device)
    near, far = torch.zeros_like(rows), torch.zeros_like(rows.t()).t()
    entries.kernels.matmul(made, factor, weight, near)
    entries.kernels.matmul(made, factor, weight.t().contiguous().t(), far)
    torch.testing.assert_close(near, far)
    near, far = torch.ones_like(weight), torch.ones_like(weight.t()).t()
    entries.kernels.transposed_matmul(made, factor, rows, near, add=True)
    entries.kernels.transposed_matmul(made, factor, rows.t().contiguous().t(), far, add=True)
    torch.testing.assert_close(near, far)


@pytest.mark.skipif(not ISAS, reason="no native kernels")
def test_native_leaves_other_dtypes_to_torch():
    columns = 301
    made, factor = made_up(CPU, columns), torch.randn(ROWS).double()
    made = made._replace(values=made.values.double())
    out = torch.zeros(ROWS, 5, dtype=torch.float64)
    weight = torch.randn(columns, 5).double()
    EntriesTarget(NativeEntries(), None, CPU).kernels.matmul(made, factor, weight, out)
    exact = (dense(made, columns) * factor[:, None]) @ weight
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
