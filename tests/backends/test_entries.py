"""The choice of a gradient's entries and products with them, by every implementation, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import Entries, StatsGrad, Tile, row_keys
from grpo_kernels.head import Transform
from tests.backends.conftest import KERNELS, Kernels
from tests.backends.problems import BF16, DTYPES, FP16, FP32, PLAIN, dlogits

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")


@pytest.fixture(params=["torch", *KERNELS])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


def logits_of(rows: int, columns: int, spread: float = 10.0) -> Tensor:
    """Return random rows, from flat to peaked."""
    return spread * (0.1 + torch.rand(rows, 1)) * torch.randn(rows, columns)


def tile_of(kernels: Kernels, logits: Tensor, transform: Transform = PLAIN, dtype=FP32) -> Tile:
    """Return a tile whose targets are drawn from plain softmax."""
    target = logits.softmax(-1).multinomial(1)[:, 0]
    return Tile(logits.to(kernels.device, dtype), target.to(kernels.device), transform)


def extract(kernels: Kernels, tile: Tile, allowed: float = 3e-3, slots: int = 512) -> Entries:
    stats = kernels.backend.stats(tile, extras=False)
    size = torch.full_like(stats.logp, allowed)
    return kernels.backend.extract_entries(tile, stats, row_keys(7, stats.lse), size, slots)


def gradient(tile: Tile) -> Tensor:
    """Return the gradient of each row's log-probability by its logits in fp64."""
    return dlogits(*tile, StatsGrad(torch.ones_like(tile.target)))


def dense(found: Entries, columns: int) -> Tensor:
    """Return entries as a matrix."""
    meant = torch.arange(found.ids.shape[1], device=found.ids.device) < found.used[:, None]
    rows = meant.nonzero()[:, 0]
    out = found.values.new_zeros(len(found.used), columns, dtype=torch.float64)
    index = (rows, found.ids[meant].long())
    return out.index_put_(index, found.values[meant].double(), accumulate=True)


def check(kernels: Kernels, tile: Tile, allowed: float = 3e-3, slots: int = 512) -> Entries:
    """Check that what is said about the error is true, and the order of the entries."""
    before = tile.logits.clone()
    found = extract(kernels, tile, allowed, slots)
    assert torch.equal(tile.logits.nan_to_num(), before.nan_to_num())
    assert found.ids.shape[1] == slots and (found.used <= slots).all()
    fits = found.used >= 0
    assert (found.error[~fits] == 0).all() and (found.error_l1[~fits] == 0).all()
    exact, got = gradient(tile)[fits], dense(found, tile.logits.shape[1])[fits]
    for value, difference, size in (
        (found.error, (got - exact).norm(dim=1), exact.norm(dim=1)),
        (found.error_l1, (got - exact).abs().sum(1), exact.abs().sum(1)),
        (found.norm, exact.norm(dim=1), exact.norm(dim=1)),
    ):
        excess = (value[fits].double() - difference).abs()
        # a probability is known to some roundings of its logit, which is 100 at most
        assert (excess <= 2e-5 * size + 1e-3 * difference + 1e-20).all(), (value, difference)
    for row in fits.nonzero()[:, 0]:
        ids = found.ids[row, : found.used[row]]
        assert ids[0] == tile.target[row] and (ids[1:] != ids[0]).all()
        assert (ids[1:].diff() > 0).all()
    return found


@pytest.mark.parametrize("columns", [1, 2, 17, 2047, 2049, 50257])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_is_what_is_said(kernels, columns, dtype):
    if kernels.interpreted and columns not in (1, 17, 2049):
        pytest.skip("for the interpreter")
    tile = tile_of(kernels, logits_of(kernels.size(9, 3), columns), dtype=dtype)
    assert (check(kernels, tile).used > 0).sum() > len(tile.target) // 2


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 20, 60])
def test_never_more_than_the_slots(kernels, slots):
    if kernels.interpreted and slots not in (1, 7, 60):
        pytest.skip("for the interpreter")
    tile = tile_of(kernels, logits_of(kernels.size(40, 4), 515))
    few, many = (check(kernels, tile, slots=n) for n in (slots, 515))
    assert (many.used > 0).all() and (few.used[many.used > slots] == -1).all()
    fits = few.used > 0
    assert torch.equal(few.used[fits], many.used[fits])
    assert torch.equal(dense(few, 515)[fits], dense(many, 515)[fits])


def test_peaks(kernels):
    """One peak at the target up to p = 1 in fp32, two peaks, and a target far below both."""
    logits = torch.randn(6, 2049)
    logits[0, 5] = 25.0
    logits[1, 5] = 60.0
    logits[2, 5] = 90.0
    logits[3:5, [7, 2000]] = 40.0
    logits[5, [7, 2000]] = 40.0
    tile = tile_of(kernels, logits)
    tile.target[:] = torch.tensor([5, 5, 5, 7, 2000, 9])
    found = check(kernels, tile)
    assert found.used.tolist() == [1, 1, 1, 2, 2, 3]
    assert found.values[5, 0] == 1 and found.values[3, 0] == -found.values[3, 1]
    others = gradient(tile)
    others[:, 5] = 0
    got = found.values[:2, 0].double()
    torch.testing.assert_close(got, -others[:2].sum(1), rtol=1e-4, atol=1e-18)


# --- products with entries, against dense products in fp64


ROWS, SLOTS = 37, 23
PAIRS = [(FP32, FP32), (BF16, FP32), (BF16, BF16), (FP16, FP32), (FP16, FP16)]


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
    kernels.backend.entries_matmul(made, factor, weight, out)
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
    kernels.backend.entries_transposed_matmul(made, factor, rows, out, add)
    coefficients = (dense(made, columns) * factor.double()[:, None]).t()
    known = torch.where(made.used[:, None] >= 0, rows, 0.0).double()
    exact = before + coefficients @ known
    size = before.abs() + coefficients.abs() @ known.abs()
    assert_rounded_once(kernels, out, exact, size)
    empty = (coefficients == 0).all(1)
    assert empty.any() and torch.equal(out[empty].double(), before[empty])
