"""The choice of a gradient's entries, by every implementation, against the exact gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import StatsGradients, Tile
from grpo_kernels.backends.entries import ANY_ERROR, TORCH_ENTRIES, Entries, row_keys
from grpo_kernels.head import Transform
from tests.backends.conftest import KERNELS, Kernels
from tests.backends.problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    PLAIN,
    TRANSFORMS,
    dlogits,
    transform_of,
)

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
    stats = kernels.rows.stats(tile, extras=False)
    size = torch.full_like(stats.logp, allowed)
    return kernels.entries.extract(tile, stats, row_keys(7, stats.lse), size, slots)


def gradient(tile: Tile) -> Tensor:
    """Return the gradient of each row's log-probability by its logits in fp64."""
    return dlogits(*tile, StatsGradients(torch.ones_like(tile.target)))


def dense(found: Entries, columns: int) -> Tensor:
    """Return entries as a matrix."""
    meant = torch.arange(found.columns, device=found.ids.device) < found.used[:, None]
    rows = meant.nonzero()[:, 0]
    out = found.values.new_zeros(len(found.used), columns, dtype=torch.float64)
    index = (rows, found.ids[meant].long())
    return out.index_put_(index, found.values[meant].double(), accumulate=True)


def check(kernels: Kernels, tile: Tile, allowed: float = 3e-3, slots: int = 512) -> Entries:
    """Check that what is said about the error is true, and the order of the entries."""
    before = tile.logits.clone()
    found = extract(kernels, tile, allowed, slots)
    assert torch.equal(tile.logits.nan_to_num(), before.nan_to_num())
    assert found.columns == slots and (found.used <= slots).all()
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


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_transforms(kernels, name, dtype):
    rows = kernels.size(9, 2)
    transform = transform_of(name, rows, kernels.device)
    tile = tile_of(kernels, logits_of(rows, 1007, 20.0), transform, dtype)
    assert (check(kernels, tile, slots=1007).used > 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_gaps_between_them(kernels, dtype):
    rows = kernels.size(5, 2)
    near = tile_of(kernels, logits_of(rows, 2049), dtype=dtype)
    storage = torch.full((rows, 2100), math.nan, dtype=dtype, device=kernels.device)
    far = near._replace(logits=storage[:, :2049].copy_(near.logits))
    assert all(map(torch.equal, extract(kernels, near), extract(kernels, far)))


def test_expected_error_is_the_allowed_one(kernels):
    """Over 400 keys, to 5 standard errors; and not far below it, where there is a choice."""
    if kernels.interpreted:
        pytest.skip("too many rows for the interpreter")
    rows, allowed = 6, 5e-3
    tile = tile_of(kernels, logits_of(rows, 1007, 4.0))
    many = Tile(tile.logits.repeat(400, 1), tile.target.repeat(400), PLAIN)
    found = extract(kernels, many, allowed, slots=1007)
    assert (found.used > 0).all()
    squared = found.error.double().square().view(400, rows)
    deviation = squared.std(0) / 20
    assert (squared.mean(0) <= allowed**2 + 5 * deviation).all()
    assert (squared.mean(0) >= 0.25 * allowed**2).all()


def test_unbiased(kernels):
    """The mean of 1,000 choices is the gradient, within 5 standard errors.

    An entry of half the cut would show a bias of 16 % of it, and all that are drawn together one
    of a few per cent of their sum.
    """
    if kernels.interpreted:
        pytest.skip("too many rows for the interpreter")
    keys, allowed = 1000, 0.1
    tile = tile_of(kernels, logits_of(4, 64, 2.0))
    exact = gradient(tile)
    for row in range(4):
        many = Tile(tile.logits[row].repeat(keys, 1), tile.target[row].repeat(keys), PLAIN)
        found = extract(kernels, many, allowed, slots=128)  # more than are needed for sure
        assert (found.used > 0).all()
        choices = dense(found, 64)
        off_target = torch.arange(64, device=kernels.device) != tile.target[row]
        size, kept = -exact[row, off_target], -choices[:, off_target]
        eps = kept[kept > 0].min()
        variance = torch.where(size < eps, size * (eps - size), 0.0) / keys
        assert (variance > 0).sum() > 10
        bias = kept.mean(0) - size
        assert (bias.abs() <= 5 * variance.sqrt() + 1e-6).all()
        assert bias.sum().abs() <= 5 * variance.sum().sqrt() + 1e-5
        torch.testing.assert_close(
            choices[:, ~off_target], exact[row, ~off_target].expand(keys, 1), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("order", ["random", "ascending", "descending"])
@pytest.mark.parametrize("transform", [PLAIN, Transform(1.0, 15.0, 0.8)], ids=["plain", "softcap"])
def test_same_entries_as_plain_torch(kernels, order, transform):
    """Up to the rounding of probabilities, on which a choice may hang; wherever the large are."""
    if kernels.name == "torch":
        pytest.skip("the same as itself")
    rows = kernels.size(24, 3)
    logits = logits_of(rows, kernels.size(50257, 2500), 14.0)
    if order != "random":
        logits = logits.sort(1, descending=order == "descending").values
    tile = tile_of(kernels, logits, transform)
    stats = kernels.rows.stats(tile, extras=False)
    keys, allowed = row_keys(7, stats.lse), torch.full_like(stats.logp, 2e-3)
    own, torchs = (
        one.extract(tile, stats, keys, allowed, 4096) for one in (kernels.entries, TORCH_ENTRIES)
    )
    assert (own.used > 0).sum() > rows // 3
    meant = torch.arange(4096, device=kernels.device) < own.used[:, None]
    same = own.used == torchs.used
    same &= torch.where(meant, own.ids == torchs.ids, True).all(1)
    assert same.sum() >= rows - rows // 12 and torch.equal(own.used < 0, torchs.used < 0)
    meant &= same[:, None]
    torch.testing.assert_close(own.values[meant], torchs.values[meant], rtol=1e-5, atol=1e-6)


def test_rows_without_a_softmax_are_whole(kernels):
    tile = tile_of(kernels, logits_of(5, 3001))
    tile.logits[0, 1500] = math.nan
    tile.logits[1, 1500] = math.inf
    tile.logits[2] = -math.inf
    softcapped = tile_of(kernels, logits_of(2, 129), Transform(softcap=30.0))
    softcapped.logits[0, softcapped.target[0]] = math.nan
    for one, lost in ((tile, 3), (softcapped, 1)):
        found = extract(kernels, one, slots=4096)
        assert (found.used[:lost] == -1).all() and (found.used[lost:] > 0).all()
        assert all(x.isfinite().all() for x in (found.error, found.error_l1, found.norm))
        assert all((x[:lost] == 0).all() for x in (found.error, found.error_l1))


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_logits_of_minus_infinity_have_no_entry(kernels, softcap):
    tile = tile_of(kernels, logits_of(3, 4101), Transform(softcap=softcap))
    tile.logits[:, ::2] = -math.inf
    tile.target[:] = torch.tensor([1, 4001, 4000])  # the last has probability 0
    found = check(kernels, tile, slots=4101)
    assert (found.used > 0).all()
    for row in range(3):
        assert (found.ids[row, 1 : found.used[row]] % 2 == 1).all()


def test_rows_that_need_too_many_entries_are_whole(kernels):
    columns = kernels.size(50257, 2500)
    logits = torch.zeros(4, columns)
    logits[1] = torch.randn(columns)
    logits[2, :300] = 20.0
    logits[3, :300] = 20.0 + torch.rand(300)
    tile = tile_of(kernels, logits)
    assert extract(kernels, tile, slots=256).used.tolist() == [-1, -1, -1, -1]
    found = check(kernels, tile, slots=400)
    assert found.used[:2].tolist() == [-1, -1] and (found.used[2:] > 250).all()
    assert (extract(kernels, tile, 1e-9, slots=columns).used >= 300).all()


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


@pytest.mark.parametrize("allowed", [0.0, 1e-30, 10.0])
def test_errors_allowed_of_any_size(kernels, allowed):
    found = check(kernels, tile_of(kernels, logits_of(5, 129)), allowed, slots=129)
    if allowed > 1:
        assert found.used.tolist() == [1] * 5
    else:
        assert (found.used > 10).all() and (found.error <= 1e-6).all()


@pytest.mark.parametrize("any_error", [ANY_ERROR, math.inf])
def test_rows_that_are_allowed_any_error_change_no_other(kernels, any_error):
    tile = tile_of(kernels, logits_of(4, 129))
    stats = kernels.rows.stats(tile, extras=False)
    keys, allowed = row_keys(7, stats.lse), torch.full_like(stats.logp, 3e-3)
    some = allowed.clone()
    some[::2] = any_error
    want, got = (kernels.entries.extract(tile, stats, keys, x, 129) for x in (allowed, some))
    assert all(torch.equal(x[1::2], y[1::2]) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize(
    "lead,softcap", [(5.0, None), (60.0, None), (0.0, 1.0)], ids=["sure", "surer", "saturated"]
)
@pytest.mark.parametrize("tolerance", [1e-2, 1e-1])
def test_tiny_gradients(kernels, lead, softcap, tolerance):
    """Nearly certain rows are allowed as little; under a softcap nearly all sizes are 0."""
    tile = tile_of(kernels, logits_of(3, 900, 4.0 if lead else 16.0), Transform(softcap=softcap))
    if lead:
        rows = torch.arange(3, device=kernels.device)
        tile.logits[rows, tile.target] = tile.logits.amax(1) + lead
    norm = gradient(tile).norm(dim=1).min().item()
    assert (check(kernels, tile, tolerance * norm, slots=1200).used > 0).all()


def test_no_rows(kernels):
    tile = tile_of(kernels, logits_of(2, 40)).rows(slice(0, 0))
    found = extract(kernels, tile, slots=8)
    assert found.ids.shape == found.values.shape == (0, 8) and len(found.used) == 0
    factor, rows = found.error, torch.empty(0, 9, device=kernels.device)
    out = torch.ones(40, 9, device=kernels.device)
    kernels.entries.matmul(found, factor, out, rows)
    for add in (True, False):
        kernels.entries.transposed_matmul(found, factor, rows, out, add)
        assert (out == add).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_same_bits_for_any_threads_and_batch(kernels, dtype):
    tile = tile_of(kernels, logits_of(kernels.size(9, 3), kernels.size(40003, 2500)), dtype=dtype)
    stats = kernels.rows.stats(tile, extras=False)
    keys, allowed = row_keys(3, stats.lse), torch.full_like(stats.logp, 1e-3)

    def run(rows: slice, threads: int) -> Entries:
        torch.set_num_threads(threads)
        some = (tile.rows(rows), stats.rows(rows), keys[rows], allowed[rows])
        return kernels.entries.extract(*some, 2048)

    whole = run(slice(None), 1)
    for threads in (1,) if kernels.interpreted else (1, 2, 3):
        assert all(map(torch.equal, whole, run(slice(None), threads)))
    parts = (slice(0, 4), slice(4, 9), slice(7, 8))
    for rows in (slice(0, 1), slice(1, 3)) if kernels.interpreted else parts:
        assert all(torch.equal(x[rows], y) for x, y in zip(whole, run(rows, 2), strict=True))


def test_a_common_offset_of_all_logits(kernels):
    """It is in no gradient: what is chosen is as if it was not there, but for its rounding."""
    near = tile_of(kernels, logits_of(3, 300, 6.0))
    near.logits.copy_((near.logits * 256).round() / 256)
    far = near._replace(logits=near.logits + 1e4)
    exact = gradient(near)
    for tile in (near, far):
        found = check(kernels, tile, slots=300)
        assert (found.used > 1).all()
        error = (dense(found, 300) - exact).norm(dim=1)
        assert (error <= 2 * 3e-3).all()  # it is 3e-3 in the mean
