"""The row kernels against fp64 and autograd: native ones of every ISA, and Triton's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGradients, Tile
from grpo_kernels.backends.base import EXTRAS
from grpo_kernels.head import Transform
from tests.backends.conftest import Kernels
from tests.backends.problems import (
    BF16,
    DTYPES,
    FP16,
    FP32,
    PLAIN,
    SPECIAL_ROWS,
    TRANSFORMS,
    dlogits,
    random_rows,
    statistics,
    transform_of,
)

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

PAIRS = [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]


def tile_of(kernels: Kernels, logits: Tensor, target: Tensor, transform=PLAIN) -> Tile:
    """Return a tile before NaNs; the rows of an odd one begin at odd places."""
    storage = logits.new_full((len(logits), logits.shape[1] + logits.shape[1] % 4), math.nan)
    storage = storage.to(kernels.device)
    view = storage[:, : logits.shape[1]].copy_(logits)
    return Tile(view, target.to(kernels.device), transform)


def assert_twice_eager(
    value: Tensor, eager: Tensor, exact: Tensor, what: str, slack: float = 0.0
) -> None:
    """Allow twice eager's largest error, and two roundings of the largest value."""
    if exact.numel() == 0:
        return
    error, allowed = ((x.double() - exact).abs().max().item() for x in (value, eager))
    largest = exact.abs().max().item()
    slack = slack * largest + 2 * torch.finfo(FP32).eps * max(largest, 1e-3)
    assert error <= 2 * allowed + slack, f"{what}: error {error:.3e}, eager's {allowed:.3e}"


def _behind(tile: Tile, dtype: torch.dtype) -> Tensor:
    """Return the bytes of each row's memory that neither its logits nor a gradient may take."""
    rows, columns = tile.logits.shape
    whole = tile.logits.as_strided((rows, tile.logits.stride(0)), (tile.logits.stride(0), 1))
    return whole.view(dtype)[:, columns:].view(torch.uint8)


def check(
    kernels: Kernels, tile: Tile, out_dtype: torch.dtype, with_entropy: bool = True
) -> RowStats:
    """Check statistics and gradient against fp64, and that nothing else is written to."""
    logits, target, transform = tile._replace(logits=tile.logits.clone())
    stats, lean = (kernels.rows.stats(tile, extras=extras) for extras in (True, False))
    assert torch.equal(tile.logits, logits)
    assert all(getattr(lean, name) is None for name in EXTRAS)
    assert all(torch.equal(a, b) for a, b in zip(lean[:3], stats[:3], strict=True))
    assert stats.lse.dtype == torch.float64 and (stats.entropy >= 0).all()

    exact, eager = (statistics(logits.to(x), target, transform) for x in (torch.float64, FP32))
    for name in ("logp", "entropy", "lse", "sum_sq_probs"):
        assert_twice_eager(*(getattr(x, name) for x in (stats, eager, exact)), name)
    for name in ("max_logit", "min_logit"):
        got, want = getattr(stats, name).double(), getattr(exact, name)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(stats.is_top1, eager.is_top1)

    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(2, len(target), generator=generator).to(logits.device)
    outer = StatsGradients(vectors[0], vectors[1] if with_entropy else None)
    behind = _behind(tile, out_dtype).clone()
    got = kernels.rows.dlogits_(tile, stats, outer, out_dtype)
    assert got.dtype == out_dtype and got.shape == logits.shape
    assert got.untyped_storage().data_ptr() == tile.logits.untyped_storage().data_ptr()
    assert torch.equal(_behind(tile, out_dtype), behind)
    # rounded once to the output's dtype; the interpreter truncates, which is one ulp
    slack = torch.finfo(out_dtype).eps if out_dtype != FP32 else 0.0
    wide = (dlogits(logits, target, transform, outer, x) for x in (FP32, torch.float64))
    assert_twice_eager(got, *wide, "dlogits", slack)
    return stats


SHAPES = [(0, 5), (1, 17), (5, 1), (5, 2), (5, 1007), (5, 2048), (3, 4096 + 77), (3, 151936)]


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_fp64(kernels, shape, dtypes):
    count, columns = shape
    if columns > 10_000:
        columns = kernels.size(columns, 32003)
    tile = tile_of(kernels, *random_rows(count, columns, dtypes[0]))
    check(kernels, tile, dtypes[1])


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("with_entropy", [True, False])
def test_transforms(kernels, name, dtypes, with_entropy):
    transform = transform_of(name, 12, kernels.device)
    tile = tile_of(kernels, *random_rows(12, 1007, dtypes[0], spread=8.0), transform)
    check(kernels, tile, dtypes[1], with_entropy)


@pytest.mark.parametrize("kind", SPECIAL_ROWS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_special_rows(kernels, kind, temperature):
    tile = tile_of(kernels, *SPECIAL_ROWS[kind](), Transform(temperature=temperature))
    exact = statistics(tile.logits.double(), tile.target, tile.transform).logp
    stats = check(kernels, tile, FP32)
    if kind == "nearly certain" and kernels.native:  # no digits are lost beside the 1 of the target
        torch.testing.assert_close(stats.logp.double(), exact, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("lead", [-120.0, 0.0, 10.0, 20.0])
def test_what_is_negligible_in_a_row(kernels, lead):
    """What only slows down the GEMMs that follow is left out: beside its row it is nothing."""
    if not kernels.native:
        pytest.skip("for the native kernels")
    generator = torch.Generator().manual_seed(2)
    logits = 30 * torch.randn(6, 1007, generator=generator)
    target = torch.arange(6)
    logits[target, target] = logits.amax(-1) + lead
    stats = kernels.rows.stats(Tile(logits, target, PLAIN), extras=False)
    outer = StatsGradients(torch.full_like(stats.logp, 1e-6))
    exact = -1e-6 * logits.double().softmax(1)
    exact[target, target] = 0
    exact[target, target] = -exact.sum(1)  # 1 - p, of which a softmax keeps no digits
    got = kernels.rows.dlogits_(Tile(logits, target, PLAIN), stats, outer, FP32)
    error = (got.double() - exact).abs()
    size = exact.abs().amax(1, keepdim=True)
    assert (error <= 1e-5 * exact.abs() + 1e-19 * size).all()
    small = exact.abs() < 2.0**-66 * size
    assert small.any() and not got[small].any()


@pytest.mark.parametrize("transform", [PLAIN, Transform(softcap=3.0)])
def test_top1_is_the_first_of_equal_maxima(kernels, transform):
    logits = torch.zeros(4, 5000)
    logits[:, [40, 2100, 4500]] = 3.0
    tile = tile_of(kernels, logits, torch.tensor([40, 2100, 4500, 0]), transform)
    stats = kernels.rows.stats(tile, extras=True)
    assert stats.is_top1.tolist() == [True, False, False, False]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_rows_without_gradient_are_exactly_zero(kernels, out_dtype):
    tile = tile_of(kernels, *random_rows(4, 1007))
    tile.logits[3] = math.nan
    stats = kernels.rows.stats(tile, extras=False)
    dlogp = torch.tensor([0.0, 1.0, 0.0, 0.0], device=kernels.device)
    dentropy = torch.tensor([0.0, 0.0, -1.0, 0.0], device=kernels.device)
    for outer, has_gradient in (
        (StatsGradients(dlogp, dentropy), [False, True, True, False]),
        (StatsGradients(dlogp), [False, True, False, False]),
        (StatsGradients(None, dentropy), [False, False, True, False]),
    ):
        whole = tile._replace(logits=tile.logits.clone())
        got = kernels.rows.dlogits_(whole, stats, outer, out_dtype)
        assert (got != 0).any(-1).tolist() == has_gradient


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_nan_and_infinity_stay_in_their_rows(kernels, dtypes):
    logits, target = random_rows(5, 3001, dtypes[0])
    target[:] = 0
    logits[0, 1500] = math.nan
    logits[1, 1500] = math.inf
    logits[2, 1:] = -math.inf
    logits[3, 0] = -math.inf
    logits[3, 1500:] = -math.inf
    tile = tile_of(kernels, logits, target)
    one = torch.ones(5, device=kernels.device)
    stats = kernels.rows.stats(tile, extras=True)
    got = kernels.rows.dlogits_(tile, stats, StatsGradients(one, one), dtypes[1])
    for row in (0, 1):
        assert stats.logp[row].isnan() and stats.entropy[row].isnan()
        assert got[row].isnan().all()
    assert stats.sum_sq_probs[0].isnan() and stats.max_logit[0].isnan() and stats.lse[0].isnan()
    assert (stats.logp[2], stats.entropy[2]) == (0, 0) and (got[2] == 0).all()
    assert stats.logp[3] == -math.inf and stats.entropy[3].isfinite() and not stats.is_top1[3]
    assert got[3].isfinite().all() and (got[3, 1500:] == 0).all() and got[3, 0] == 1
    assert got[4].isfinite().all() and all(x[4].isfinite() for x in stats if x is not None)


def test_target_of_probability_zero(kernels):
    logits, target = random_rows(1, 7)
    logits[0, target] = -math.inf
    tile = tile_of(kernels, logits, target)
    stats = kernels.rows.stats(tile, extras=False)
    want = torch.nn.functional.one_hot(target, 7) - logits.softmax(-1)
    got = kernels.rows.dlogits_(tile, stats, StatsGradients(torch.ones_like(stats.logp)), FP32)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("name", ["temperature", "all"])
def test_gradient_of_a_slice_of_the_vocabulary(kernels, name, dtypes):
    """With the statistics of the whole; a target that lies elsewhere takes no gradient."""
    transform = transform_of(name, 4, kernels.device)
    logits, target, _ = tile = tile_of(kernels, *random_rows(4, 1007, dtypes[0]), transform)
    target[:2] = torch.tensor([3, 1006])
    stats = kernels.rows.stats(tile, extras=False)
    outer = StatsGradients(*torch.randn(2, 4, device=kernels.device))
    exact = dlogits(logits, target, transform, outer)
    rtol, atol = (1e-4, 1e-6) if dtypes[1] == FP32 else (1e-2, 1e-5)
    for columns in (slice(0, 5), slice(5, 600), slice(600, 1007)):
        inside = target - columns.start
        outside = (inside < 0) | (inside >= columns.stop - columns.start)
        for elsewhere in (inside, -1, 2**40, -(2**40)):
            own = torch.where(outside, elsewhere, inside)
            part = Tile(logits[:, columns].clone(), own, transform)
            got = kernels.rows.dlogits_(part, stats, outer, dtypes[1])
            torch.testing.assert_close(got.double(), exact[:, columns], rtol=rtol, atol=atol)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_same_bits_for_any_threads_and_batch(kernels, dtypes):
    columns = kernels.size(40003, 1007)
    tile = tile_of(kernels, *random_rows(9, columns, dtypes[0]), Transform(temperature=0.8))
    outer = StatsGradients(*torch.randn(2, 9, device=kernels.device))

    def run(part: slice, threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        some = tile.rows(part)
        some = some._replace(logits=some.logits.clone())
        stats = kernels.rows.stats(some, extras=True)
        gradient = kernels.rows.dlogits_(some, stats, outer.rows(part), dtypes[1])
        return [*(x for x in stats if x is not None), gradient]

    whole = run(slice(None), 1)
    for threads in (1,) if kernels.interpreted else (1, 2, 3):
        assert all(map(torch.equal, whole, run(slice(None), threads)))
    for row in range(9):
        alone = run(slice(row, row + 1), 2)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(whole, alone, strict=True))


def test_narrowing_in_place_is_the_rounded_fp32_gradient(kernels):
    """Bit for bit: a store that overtook a load of the same row would show. Large on a GPU."""
    count, columns = (2000, 50_001) if kernels.device.type == "cuda" else (3, 4096 + 77)
    tile = tile_of(kernels, *random_rows(count, columns))
    stats = kernels.rows.stats(tile, extras=False)
    outer = StatsGradients(*torch.randn(2, count, device=kernels.device))
    wide, narrow = (
        kernels.rows.dlogits_(tile._replace(logits=tile.logits.clone()), stats, outer, dtype)
        for dtype in (FP32, FP16)
    )
    assert torch.equal(wide.to(FP16), narrow)


def test_offsets_beyond_32_bits(kernels):
    """Two rows 2**31 elements apart, in an allocation of which only they are touched."""
    if kernels.interpreted:
        pytest.skip("the interpreter copies whole storages")
    columns, stride = 1007, 2**31 + 64
    near = tile_of(kernels, *random_rows(2, columns, BF16))
    storage = torch.empty(stride + columns, dtype=BF16, device=kernels.device)
    far = near._replace(logits=storage.as_strided((2, columns), (stride, 1)).copy_(near.logits))
    outer = StatsGradients(*torch.ones(2, 2, device=kernels.device))
    results = []
    for tile in (near, far):
        stats = kernels.rows.stats(tile, extras=False)
        got = kernels.rows.dlogits_(tile, stats, outer, BF16)
        results.append((stats.logp, stats.entropy, got))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_unsuitable_tiles_are_named(device):
    from grpo_kernels.backends.triton import TRITON_ROWS

    logits, target = torch.zeros(3, 8, device=device), torch.zeros(3, device=device).long()
    for wrong, message in (
        (Tile(logits.double(), target, PLAIN), "logits: expected one of"),
        (Tile(logits.t(), target, PLAIN), "contiguous columns"),
        (Tile(logits, target[:2], PLAIN), "target: expected"),
        (Tile(logits, target, Transform(temperature=logits[0])), "temperature: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            TRITON_ROWS.stats(wrong, False)
    whole = Tile(logits, target, PLAIN)
    stats = TRITON_ROWS.stats(whole, False)
    with pytest.raises(ValueError, match="out_dtype: expected"):
        TRITON_ROWS.dlogits_(whole, stats, StatsGradients(stats.logp), torch.float64)
