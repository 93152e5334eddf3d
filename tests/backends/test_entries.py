"""The choice of a gradient's entries and products with them, by every implementation, in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends
from grpo_kernels.backends import (
    ANY_ERROR,
    BACKENDS,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
)
from grpo_kernels.backends.entries import best_cut, sampled_blocks
from grpo_kernels.head import Transform
from tests.backends.conftest import KERNELS, Kernels
from tests.backends.problems import BF16, DTYPES, FP16, FP32, PLAIN, dlogits, transform_of

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


def extract(
    kernels: Kernels,
    tile: Tile,
    cut: float = 1e-4,
    slots: int = 512,
    gradient: TileGradient | None = None,
    stats: RowStats | None = None,
) -> Entries:
    stats = kernels.backend.stats(tile, extras=False) if stats is None else stats
    cuts = torch.full_like(stats.logprobs, cut)
    return kernels.backend.extract_entries(
        tile=tile, stats=stats, seed=7, first=0, cuts=cuts, slots=slots, gradient=gradient
    )


def exact_gradient(tile: Tile) -> Tensor:
    """Return the gradient of each row's log-probability by its logits in fp64."""
    return dlogits(*tile, StatsGrad(torch.ones_like(tile.target)))


def dense(found: Entries, columns: int) -> Tensor:
    """Return entries as a matrix."""
    meant = torch.arange(found.ids.shape[1], device=found.ids.device) < found.used[:, None]
    rows = meant.nonzero()[:, 0]
    out = found.values.new_zeros(len(found.used), columns, dtype=torch.float64)
    index = (rows, found.ids[meant].long())
    return out.index_put_(index, found.values[meant].double(), accumulate=True)


def check(kernels: Kernels, tile: Tile, cut: float = 1e-4, slots: int = 512) -> Entries:
    """Check that what is said about the error is true, and that no id is there twice."""
    before = tile.logits.clone()
    found = extract(kernels, tile, cut, slots)
    assert torch.equal(tile.logits.nan_to_num(), before.nan_to_num())
    check_found(found, exact_gradient(tile), tile.target, cut, slots)
    return found


def check_found(
    found: Entries, exact: Tensor, target: Tensor, cut: float, slots: int, rounding: float = 2e-5
) -> None:
    assert found.ids.shape[1] == slots and (found.used <= slots).all()
    fits = found.used >= 0
    for value in (found.error, found.error_l1, found.expected_error):
        assert (value[~fits] == 0).all()
    sizes = exact.abs().scatter(1, target[:, None], 0.0)
    known = torch.where(fits[:, None] | (sizes <= cut), exact, 0.0)  # of a whole row
    own = torch.arange(len(exact), device=exact.device)
    known[own, target] = exact[own, target]
    norm = known.norm(dim=1)
    finite = exact.isfinite().all(1)
    excess = (found.norm.double() - norm).abs()[finite]
    assert (excess <= rounding * norm[finite] + 1e-9).all(), (found.norm, norm)
    exact, got, target = exact[fits], dense(found, exact.shape[1])[fits], target[fits]
    tail = torch.where(sizes <= cut, sizes, 0.0)[fits]
    expected = (tail * (cut - tail)).sum(1).sqrt()
    for value, difference, size in (
        (found.error, (got - exact).norm(dim=1), norm[fits]),
        (found.error_l1, (got - exact).abs().sum(1), exact.abs().sum(1)),
        (found.expected_error, expected, norm[fits]),
    ):
        excess = (value[fits].double() - difference).abs()
        # a probability is known to some roundings of its logit, which is 100 at most, and 1 - p to
        # some of a sum near 1
        assert (excess <= rounding * size + 1e-3 * difference + 1e-9).all(), (value, difference)
    for row, ids in enumerate(found.ids[fits]):
        ids = ids[: found.used[fits][row]]
        assert len(ids.unique()) == len(ids)
        assert (ids == target[row]).any() or exact[row, target[row]] <= 1e-7


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
    few, many = (check(kernels, tile, 3e-3, n) for n in (slots, 600))
    assert (many.used > 0).all() and (few.used[many.used > slots] == -1).all()
    fits = few.used > 0
    assert torch.equal(few.used[fits], many.used[fits])
    assert torch.equal(dense(few, 515)[fits], dense(many, 515)[fits])


@pytest.mark.parametrize("name", ["plain", "softcap"])
def test_with_a_gradient_of_the_entropy(kernels, name):
    """Entries of either sign, in proportion to p log p where the entropy has all of the weight."""
    rows, columns = kernels.size(12, 4), 2500
    logits = logits_of(rows, columns)
    logits[0, 10:20] = -math.inf
    tile = tile_of(kernels, logits, transform_of(name, rows, torch.device("cpu")))
    tile = tile._replace(transform=transform_of(name, rows, kernels.device))
    stats = kernels.backend.stats(tile, extras=False)
    dlogp, dentropy = torch.randn(2, rows, device=kernels.device)
    dlogp[1], dentropy[2] = 0.0, 0.0
    grad_stats = StatsGrad(dlogp, dentropy)
    exact = dlogits(*tile, StatsGrad(dlogp.double(), dentropy.double()))
    cuts = torch.full_like(stats.logprobs, 1e-3)
    found = kernels.backend.extract_entries(
        tile=tile, stats=stats, seed=3, first=0, cuts=cuts, slots=columns + 1, grad_stats=grad_stats
    )
    check_found(found, exact, tile.target, 1e-3, columns + 1, 5e-5)
    got = dense(found, columns)
    assert ((got < 0) & (got.abs() >= 1e-3)).any(1).all() and (got > 0).sum() > rows
    large = (exact.abs() > 1.01e-3) & (got != 0)
    torch.testing.assert_close(got[large], exact[large], rtol=1e-3, atol=1e-6)
    assert ((got == 0) | (got.sign() == exact.sign())).all()


@pytest.mark.parametrize("beyond", [-7, 0])
def test_the_target_is_in_the_columns_of_another_rank(kernels, beyond):
    tile = tile_of(kernels, logits_of(4, 2100))
    tile.target[:] = torch.tensor([1100, 1300, 1024, 2099])
    stats, exact = kernels.backend.stats(tile, extras=False), exact_gradient(tile)[:, :1024]
    target = tile.target if beyond == 0 else torch.full_like(tile.target, beyond)
    half = Tile(tile.logits[:, :1024].contiguous(), target, PLAIN)
    cuts = torch.full_like(stats.logprobs, 1e-3)
    found = kernels.backend.extract_entries(
        tile=half, stats=stats, seed=7, first=0, cuts=cuts, slots=1025
    )
    got = dense(found, 1024)
    assert (found.used >= 0).all() and (got <= 0).all() and (got != 0).any()
    for value, want in (
        (found.error, (got - exact).norm(dim=1)),
        (found.error_l1, (got - exact).abs().sum(1)),
        (found.norm, exact.norm(dim=1)),
    ):
        torch.testing.assert_close(value.double(), want, rtol=2e-3, atol=1e-6)
    kept = exact < -1.01e-3
    torch.testing.assert_close(got[kept], exact[kept], rtol=1e-3, atol=1e-6)


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
    got, exact = dense(found, 2049), exact_gradient(tile)
    kept = got != 0
    torch.testing.assert_close(got[kept], exact[kept], rtol=1e-4, atol=1e-9)


def test_rows_without_a_gradient_or_a_softmax(kernels):
    tile = tile_of(kernels, logits_of(4, 300))
    tile.logits[1:3, 7] = math.nan
    stats = kernels.backend.stats(tile, extras=False)
    cuts = torch.tensor([1e-4, 1e-4, ANY_ERROR, 2 * ANY_ERROR], device=kernels.device)
    found = kernels.backend.extract_entries(
        tile=tile, stats=stats, seed=7, first=0, cuts=cuts, slots=300
    )
    assert found.used[0] > 0 and found.used[1:].tolist() == [-1, 0, 0]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_all_backends_draw_the_same_sample(kernels, softcap):
    """Except for a few entries that rounding decides."""
    transform = Transform(0.5, softcap, 0.7)
    tile = tile_of(kernels, logits_of(kernels.size(40, 3), 5000), transform)
    stats = BACKENDS["chunked"].stats(tile, extras=False)
    want = dense(extract(Kernels("torch"), tile, 1e-3, 5000, stats=stats), 5000)
    got = dense(extract(kernels, tile, 1e-3, 5000, stats=stats), 5000)
    differ = ((got - want).abs() > 1e-4 * want.abs()).sum()
    assert (want != 0).sum() > 200 * len(want) // 40 and differ <= (want != 0).sum() // 500


@pytest.fixture
def triton() -> Kernels:
    if "triton" not in available_backends():
        pytest.skip("the interpreter is off")
    return Kernels("triton")


@pytest.mark.parametrize("name", ["plain", "softcap", "temperature"])
@pytest.mark.parametrize("columns", [17, 2049, 4096])
def test_triton_reads_gradients_in_place_of_logits(triton, columns, name):
    """They hold sizes with 8 bits, of which the error is said; at the target there is a better
    value, but with a softcap."""
    logits = logits_of(5, columns)
    logits[4] = math.nan
    target = logits[:4].softmax(-1).multinomial(1)[:, 0]
    target = torch.cat([target, target[:1]]).to(triton.device)
    transform = transform_of(name, 5, triton.device)
    tile = Tile(logits.to(triton.device), target, transform)
    exact = exact_gradient(tile)
    stats, gradient = triton.backend.logp_gradient_(tile)
    of_rows = gradient.dlogits.double() * gradient.row_scale[:, None].double()
    if name != "softcap":
        of_rows.scatter_(1, target[:, None], exact.gather(1, target[:, None]))
    weight, cuts = torch.ones(5, device=triton.device), torch.logspace(-9, 0, 12)
    sums = triton.backend.tail_sums(tile, stats, weight, cuts.to(triton.device), gradient)
    found = extract(triton, tile, 1e-3, columns + 1, gradient, stats)
    assert found.used[4] == -1 and (sums[4] == 0).all()
    some = Entries(*(x[:4] for x in found))
    check_found(some, of_rows[:4], target[:4], 1e-3, columns + 1)
    got = dense(some, columns)
    kept = got.abs() > 1.001e-3
    assert ((got - exact[:4]).abs() <= 2**-6 * exact[:4].abs())[kept].all()
    blocks, sampled = sampled_blocks(5, columns)
    sizes = of_rows[:4].abs().scatter(1, target[:4, None], 0.0).cpu()
    if sampled == blocks:
        tails = torch.where(sizes[:, None] <= cuts[:, None], sizes[:, None], 0.0)
        torch.testing.assert_close(sums[:4, 0].cpu().double(), tails.sum(2), rtol=1e-3, atol=1e-8)


@pytest.mark.parametrize("spread", [1.0, 3.0, 10.0], ids=["flat", "open", "peaked"])
def test_right_in_the_mean(kernels, spread):
    """Over many draws, within five standard errors of each row's sum of them."""
    if kernels.name == "triton" and kernels.device.type == "cpu":
        pytest.skip("too slow, and the same sample as of the others")
    # torch draws the same sample, but slowly
    draws, rows, columns = 2_000 if kernels.name == "torch" else 10_000, 8, 600
    logits = spread * torch.randn(rows, columns)
    tile = tile_of(kernels, logits)
    stats = kernels.backend.stats(tile, extras=False)
    exact, cut = exact_gradient(tile), 0.02
    total = torch.zeros_like(exact)
    for first in range(0, draws, 500):
        many = Tile(tile.logits.repeat(500, 1), tile.target.repeat(500), PLAIN)
        same = RowStats(*(x.repeat(500) for x in stats[:3]))
        cuts = torch.full_like(same.logprobs, cut)
        found = kernels.backend.extract_entries(
            tile=many, stats=same, seed=first, first=0, cuts=cuts, slots=256
        )
        assert (found.used > 0).all()
        total += dense(found, columns).view(500, rows, columns).sum(0)
    error = total / draws - exact
    sizes = exact.abs().scatter(1, tile.target[:, None], 0.0)
    variance = torch.where(sizes <= cut, sizes * (cut - sizes), 0.0)
    assert (variance.sum(1) > 0).all()
    assert error.square().sum() <= 2 * variance.sum() / draws
    often = (sizes * draws > 20 * cut) | (sizes > cut)
    assert (often & (sizes <= cut)).sum() > 20  # of the tail
    assert (error.abs() <= 5 * (variance / draws).sqrt() + 1e-5 * sizes + 1e-7)[often].all()


@pytest.mark.parametrize("columns", [300, 5000, 70000])
def test_tail_sums(kernels, columns):
    """Each row's sampled blocks of 2,048 columns, of which there are more of the first rows."""
    rows, cuts = 7, torch.logspace(-9, 0, 12)
    tile = tile_of(kernels, logits_of(rows, columns), Transform(1.0, None, 1.3))
    tile.logits[6] = math.nan
    stats, weight = kernels.backend.stats(tile, extras=False), torch.rand(rows) + 0.5
    given = weight.to(kernels.device), cuts.to(kernels.device)
    got = kernels.backend.tail_sums(tile, stats, *given).cpu()
    sizes = exact_gradient(tile).cpu().abs().scatter(1, tile.target.cpu()[:, None], 0.0)
    blocks, sampled = sampled_blocks(rows, columns)
    assert blocks == -(-columns // 2048) and 1 <= sampled <= blocks
    for row in range(rows - 1):
        some = {(row + i * blocks // sampled) % blocks for i in range(sampled)}
        assert len(some) == sampled
        of_blocks = torch.cat([sizes[row, 2048 * i : 2048 * i + 2048] for i in some])
        of_blocks *= weight[row]
        tails = torch.where(of_blocks <= cuts[:, None], of_blocks, 0.0)
        exact = torch.stack([tails.sum(1), tails.square().sum(1)])
        torch.testing.assert_close(got[row].double(), exact, rtol=1e-3, atol=1e-8)
    assert (got[6] == 0).all()


@pytest.mark.parametrize(
    "name,given",
    [
        ("plain", "nothing"),
        ("temperature", "nothing"),
        ("softcap", "dlogp"),
        ("plain", "dentropy"),
        ("softcap", "dentropy"),
    ],
)
def test_all_rows_share_a_cut_for_their_error(kernels, name, given):
    rows, columns, share = kernels.size(200, 30), 3000, 1e-2
    tile = tile_of(kernels, logits_of(rows, columns), transform_of(name, rows, torch.device("cpu")))
    tile = tile._replace(transform=transform_of(name, rows, kernels.device))
    tile.logits[3, 5] = math.nan
    stats = kernels.backend.stats(tile, extras=False)
    dlogp, dentropy = torch.randn(2, rows, device=kernels.device)
    dlogp[::6] = dentropy[::6] = 0.0
    grad_stats, weight = None, torch.ones(rows, dtype=torch.float64, device=kernels.device)
    if given == "dlogp":
        grad_stats, weight = StatsGrad(dlogp), dlogp.abs().double()
    if given == "dentropy":
        grad_stats, weight = StatsGrad(dlogp, dentropy), (dlogp != 0).double()
    cuts = kernels.backend.chosen_cuts(tile, stats, grad_stats, share).double()
    assert (cuts[weight == 0] >= ANY_ERROR).all()
    used = stats.lse.isfinite() & (weight > 0)
    shared = (cuts * weight)[used]
    torch.testing.assert_close(shared, shared[:1].expand_as(shared), rtol=1e-5, atol=0.0)
    exact = dlogits(*tile, grad_stats if given == "dentropy" else StatsGrad(torch.ones_like(cuts)))
    exact, target = (exact * weight[:, None])[used], tile.target[used][:, None]
    norm = exact.gather(1, target).square().sum()
    sizes = exact.abs().scatter(1, target, 0.0)
    tail = torch.where(sizes <= shared[:1], sizes, 0.0)
    error = (tail * (shared[:1] - tail)).sum()
    assert 0.4 * share**2 * norm < error < 1.6 * share**2 * norm


def test_the_best_cut_has_the_error_that_is_allowed():
    sizes = torch.rand(1000, dtype=torch.float64) ** 8
    cuts = 0.001 ** torch.linspace(1, 0, 12, dtype=torch.float64)
    tails = torch.where(sizes <= cuts[:, None], sizes, 0.0)
    sums = torch.stack([tails.sum(1), tails.square().sum(1)])
    for allowed in (1e-4, 1e-3, 0.1, 1.0):
        cut = best_cut(sums, cuts, allowed)
        tail = torch.where(sizes <= cut, sizes, 0.0)
        assert 0.8 * allowed < (tail * (cut - tail)).sum() <= allowed
    assert best_cut(sums, cuts, 1e6) == 1


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
    return Entries(*(x.to(kernels.device) for x in (ids, values, used)), *torch.zeros(4, ROWS))


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
    count = int(made.used.clamp(min=0).sum())
    kernels.backend.entries_transposed_matmul(made, factor, rows, out, add, count)
    coefficients = (dense(made, columns) * factor.double()[:, None]).t()
    known = torch.where(made.used[:, None] >= 0, rows, 0.0).double()
    exact = before + coefficients @ known
    size = before.abs() + coefficients.abs() @ known.abs()
    assert_rounded_once(kernels, out, exact, size)
    empty = (coefficients == 0).all(1)
    assert empty.any() and torch.equal(out[empty].double(), before[empty])


def test_an_id_of_most_rows(kernels):
    """Its rows are summed in pieces, which begin and end where other ids' rows may."""
    rows, slots, columns = 1500, 3, 12
    ids = torch.stack([torch.randperm(columns - 2)[:slots] for _ in range(rows)]).int()
    ids[:, 0] = torch.where(torch.rand(rows) < 0.8, 10, ids[:, 0])
    used = torch.full((rows,), slots, dtype=torch.int32)
    values = torch.randn(rows, slots)
    made = Entries(*(x.to(kernels.device) for x in (ids, values, used)), *torch.zeros(4, rows))
    factor = torch.randn(rows, device=kernels.device)
    factor[::5] = 0
    x, out = matrix(kernels, rows, 40), matrix(kernels, columns, 40)
    count = int((factor != 0).sum()) * slots
    kernels.backend.entries_transposed_matmul(made, factor, x, out, False, count)
    coefficients = (dense(made, columns) * factor.double()[:, None]).t()
    assert_rounded_once(
        kernels, out, coefficients @ x.double(), coefficients.abs() @ x.double().abs()
    )
    again = torch.empty_like(out)
    kernels.backend.entries_transposed_matmul(made, factor, x, again, False, count)
    assert torch.equal(out, again)
