"""The row kernels against fp64 and autograd: Triton's, and the native ones of every ISA."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGradients, Tile
from grpo_kernels.backends.base import EXTRAS
from grpo_kernels.head import Transform
from tests.backends.conftest import RowTarget
from tests.support.linear_problems import BF16, DTYPES, FP16, FP32, statistics

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

PAIRS = [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]
TRANSFORMS = {
    "temperature": Transform(temperature=0.7),
    "scale": Transform(logit_scale=0.25, temperature=1.3),
    "softcap": Transform(softcap=5.0),
    "all": Transform(logit_scale=1.5, softcap=20.0, temperature=0.6),
}
PLAIN = Transform()


def dlogits(
    logits: Tensor, target: Tensor, transform: Transform, outer: StatsGradients, wide: torch.dtype
) -> Tensor:
    """Compute the gradient of the logits by autograd, in ``wide``."""
    logits = logits.detach().to(wide).requires_grad_()
    stats = statistics(logits, target, transform)
    loss = sum(
        (values * gradient.to(wide)).sum()
        for values, gradient in zip(stats[:2], outer[:2], strict=True)
        if gradient is not None
    )
    return torch.autograd.grad(loss, logits)[0]


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


def check(
    rows: RowTarget,
    logits: Tensor,
    target: Tensor,
    transform: Transform = PLAIN,
    out_dtype: torch.dtype | None = None,
    padding: int = 0,
    with_entropy: bool = True,
) -> RowStats:
    """Check statistics and gradient against fp64, and that nothing else is written to."""
    out_dtype = out_dtype or logits.dtype
    columns = logits.shape[1]
    storage = logits.new_full((logits.shape[0], columns + padding), math.nan)
    view = storage[:, :columns].copy_(logits)
    tile = Tile(view, target, transform)
    stats = rows.kernels.stats(tile, extras=True)
    lean = rows.kernels.stats(tile, extras=False)
    assert torch.equal(view, logits)
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
    behind = storage.view(out_dtype)[:, columns:].view(torch.uint8).clone()
    got = rows.kernels.dlogits_(tile, stats, outer, out_dtype)
    assert got.dtype == out_dtype and got.shape == logits.shape
    assert got.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    assert torch.equal(storage.view(out_dtype)[:, columns:].view(torch.uint8), behind)
    # rounded once to the output's dtype; the interpreter truncates, which is one ulp
    slack = torch.finfo(out_dtype).eps if out_dtype != FP32 else 0.0
    wide = (dlogits(logits, target, transform, outer, x) for x in (FP32, torch.float64))
    assert_twice_eager(got, *wide, "dlogits", slack)
    return stats


def tile(
    rows: RowTarget, count: int, columns: int, dtype: torch.dtype = FP32, spread: float = 4.0
) -> tuple[Tensor, Tensor]:
    """Return random logits (count, columns) and targets; every other target is the argmax."""
    logits = (spread * torch.randn(count, columns)).to(dtype)
    target = torch.randint(columns, (count,))
    target[::2] = logits[::2].float().argmax(-1)
    return logits.to(rows.device), target.to(rows.device)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 5, 17, 1007, 2048, 4096 + 77])
def test_matches_fp64(rows, columns, dtypes):
    for count in (0, 1, 5):
        logits, target = tile(rows, count, columns, dtypes[0])
        check(rows, logits, target, PLAIN, dtypes[1], padding=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_gradient_of_the_entropy(rows, dtype):
    check(rows, *tile(rows, 3, 1007, dtype), with_entropy=False)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_large_vocabulary(rows, dtype):
    columns = 32003 if rows.interpreted else 151936
    check(rows, *tile(rows, 3, columns, dtype), Transform(temperature=0.9))


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms(rows, transform, dtypes):
    for columns in (1, 1007):
        logits, target = tile(rows, 5, columns, dtypes[0], spread=8.0)
        check(rows, logits, target, transform, dtypes[1], padding=1)


@pytest.mark.parametrize("softcap", [None, 25.0])
def test_temperature_per_row(rows, softcap):
    temperature = torch.tensor([0.1, 0.5, 1.0, 1.5, 3.0, 100.0], device=rows.device)
    check(rows, *tile(rows, 6, 1007), Transform(1.0, softcap, temperature))


@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=str)
def test_odd_strides(rows, out_dtype):
    check(rows, *tile(rows, 3, 1007), out_dtype=out_dtype, padding=13)


@pytest.mark.parametrize("offset", [-1e4, -150.0, 150.0, 1e4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_offset_logits(rows, offset, temperature):
    for columns in (5, 5003):
        logits, target = tile(rows, 6, columns)
        check(rows, logits + offset, target, Transform(temperature=temperature))


@pytest.mark.parametrize("lead", [10.0, 12.0, 16.6, 20.0, 60.0, 200.0])
def test_probability_near_one(rows, lead):
    """The native ones lose no digits beside the 1 of the largest term."""
    logits, target = tile(rows, 4, 1007, spread=1.0)
    each = torch.arange(4, device=rows.device)
    logits[each, target] = logits.amax(-1) + lead
    stats = check(rows, logits, target)
    assert stats.is_top1.all()
    if rows.native:
        exact = logits.double().log_softmax(-1)[each, target]
        torch.testing.assert_close(stats.logp.double(), exact, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("lead", [-120.0, 0.0, 10.0, 20.0])
def test_what_is_negligible_in_a_row(rows, lead):
    """What only slows down the GEMMs that follow is left out: beside its row it is nothing."""
    if not rows.native:
        pytest.skip("for the native kernels")
    generator = torch.Generator().manual_seed(2)
    logits = 30 * torch.randn(6, 1007, generator=generator)
    target = torch.arange(6)
    logits[target, target] = logits.amax(-1) + lead
    stats = rows.kernels.stats(Tile(logits, target, PLAIN), extras=False)
    outer = StatsGradients(torch.full_like(stats.logp, 1e-6))
    exact = -1e-6 * logits.double().softmax(1)
    exact[target, target] = 0
    exact[target, target] = -exact.sum(1)  # 1 - p, of which a softmax keeps no digits
    got = rows.kernels.dlogits_(Tile(logits.clone(), target, PLAIN), stats, outer, FP32)
    error = (got.double() - exact).abs()
    size = exact.abs().amax(1, keepdim=True)
    assert (error <= 1e-5 * exact.abs() + 1e-19 * size).all()
    small = exact.abs() < 2.0**-66 * size
    assert small.any() and not got[small].any()


@pytest.mark.parametrize("depth", [30.0, 60.0, 69.0, 85.0, 120.0])
def test_improbable_target(rows, depth):
    logits, target = tile(rows, 4, 1007, spread=1.0)
    logits[torch.arange(4, device=rows.device), target] -= depth
    for offset in (0.0, 150.0):
        assert (check(rows, logits + offset, target).logp < -depth).all()


def test_rising_logits_move_the_maximum_in_every_block(rows):
    logits = torch.linspace(-300, 40, 20011, device=rows.device).repeat(2, 1)
    check(rows, logits, torch.tensor([20010, 19000], device=rows.device))


@pytest.mark.parametrize("transform", [PLAIN, Transform(softcap=3.0)])
def test_top1_is_the_first_of_equal_maxima(rows, transform):
    logits = torch.zeros(4, 5000, device=rows.device)
    logits[:, [40, 2100, 4500]] = 3.0
    target = torch.tensor([40, 2100, 4500, 0], device=rows.device)
    stats = rows.kernels.stats(Tile(logits, target, transform), extras=True)
    assert stats.is_top1.tolist() == [True, False, False, False]


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_rows_without_gradient_are_exactly_zero(rows, out_dtype):
    logits, target = tile(rows, 4, 1007)
    logits[3] = math.nan
    stats = rows.kernels.stats(Tile(logits, target, PLAIN), extras=False)
    dlogp = torch.tensor([0.0, 1.0, 0.0, 0.0], device=rows.device)
    dentropy = torch.tensor([0.0, 0.0, -1.0, 0.0], device=rows.device)
    for outer, has_gradient in (
        (StatsGradients(dlogp, dentropy), [False, True, True, False]),
        (StatsGradients(dlogp), [False, True, False, False]),
        (StatsGradients(None, dentropy), [False, False, True, False]),
    ):
        whole = Tile(logits.clone(), target, PLAIN)
        got = rows.kernels.dlogits_(whole, stats, outer, out_dtype)
        assert (got != 0).any(-1).tolist() == has_gradient


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_nan_and_infinity_stay_in_their_rows(rows, dtypes):
    logits, target = tile(rows, 5, 3001, dtypes[0])
    target[:] = 0
    logits[0, 1500] = math.nan
    logits[1, 1500] = math.inf
    logits[2, 1:] = -math.inf
    logits[3, 0] = -math.inf
    logits[3, 1500:] = -math.inf
    one = torch.ones(5, device=rows.device)
    stats = rows.kernels.stats(Tile(logits, target, PLAIN), extras=True)
    copy = Tile(logits.clone(), target, PLAIN)
    got = rows.kernels.dlogits_(copy, stats, StatsGradients(one, one), dtypes[1])
    for row in (0, 1):
        assert stats.logp[row].isnan() and stats.entropy[row].isnan()
        assert got[row].isnan().all()
    assert stats.sum_sq_probs[0].isnan() and stats.max_logit[0].isnan() and stats.lse[0].isnan()
    assert (stats.logp[2], stats.entropy[2]) == (0, 0) and (got[2] == 0).all()
    assert stats.logp[3] == -math.inf and stats.entropy[3].isfinite() and not stats.is_top1[3]
    assert got[3].isfinite().all() and (got[3, 1500:] == 0).all() and got[3, 0] == 1
    assert got[4].isfinite().all() and all(x[4].isfinite() for x in stats if x is not None)


def test_minus_infinity_logits(rows):
    """Columns with -inf, one of them a whole first tile, carry no probability and no gradient."""
    logits, target = tile(rows, 3, 2 * 4096 + 5)
    logits[0, ::2] = -math.inf
    logits[1, :4096] = -math.inf
    logits[2, :-1] = -math.inf
    target[:] = torch.tensor([1, 5000, 2 * 4096 + 4])
    stats = check(rows, logits, target)
    assert stats.logp[2] == 0 and stats.entropy[2] == 0


def test_target_of_probability_zero(rows):
    logits, target = tile(rows, 1, 7)
    logits[0, target] = -math.inf
    whole = Tile(logits, target, PLAIN)
    stats = rows.kernels.stats(whole, extras=True)
    assert stats.logp.item() == -math.inf and not stats.is_top1.item()
    want = -logits.softmax(-1)
    want[0, target] = 1.0
    got = rows.kernels.dlogits_(whole, stats, StatsGradients(torch.ones_like(want[:, 0])), FP32)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("name", ["temperature", "all"])
def test_gradient_of_a_slice_of_the_vocabulary(rows, name, dtypes):
    """With the statistics of the whole; a target that lies elsewhere takes no gradient."""
    logits, target = tile(rows, 4, 1007, dtypes[0])
    target[:2] = torch.tensor([3, 1006])
    transform = TRANSFORMS[name]
    stats = rows.kernels.stats(Tile(logits, target, transform), extras=False)
    outer = StatsGradients(*torch.randn(2, 4, device=rows.device))
    exact = dlogits(logits, target, transform, outer, torch.float64)
    rtol, atol = (1e-4, 1e-6) if dtypes[1] == FP32 else (1e-2, 1e-5)
    for columns in (slice(0, 5), slice(5, 600), slice(600, 1007)):
        inside = target - columns.start
        outside = (inside < 0) | (inside >= columns.stop - columns.start)
        for elsewhere in (inside, -1, 2**40, -(2**40)):
            own = torch.where(outside, elsewhere, inside)
            part = Tile(logits[:, columns].clone(), own, transform)
            got = rows.kernels.dlogits_(part, stats, outer, dtypes[1])
            torch.testing.assert_close(got.double(), exact[:, columns], rtol=rtol, atol=atol)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_same_bits_for_any_threads_and_batch(rows, dtypes):
    logits, target = tile(rows, 9, 1007 if rows.interpreted else 40003, dtypes[0])
    grads = torch.randn(2, 9, device=rows.device)

    def run(part: slice, threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        some = Tile(logits[part].clone(), target[part], Transform(temperature=0.8))
        stats = rows.kernels.stats(some, extras=True)
        outer = StatsGradients(*grads[:, part])
        return [*(x for x in stats if x is not None),
                rows.kernels.dlogits_(some, stats, outer, dtypes[1])]  # fmt: skip

    whole = run(slice(None), 1)
    for threads in (1,) if rows.interpreted else (1, 2, 3):
        assert all(map(torch.equal, whole, run(slice(None), threads)))
    for row in range(9):
        alone = run(slice(row, row + 1), 2)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(whole, alone, strict=True))


def test_narrowing_in_place_is_the_rounded_fp32_gradient(rows):
    """Bit for bit: a store that overtook a load of the same row would show. Large on a GPU."""
    count, columns = (2000, 50_001) if rows.device.type == "cuda" else (3, 4096 + 77)
    logits, target = tile(rows, count, columns)
    stats = rows.kernels.stats(Tile(logits, target, PLAIN), extras=False)
    outer = StatsGradients(*torch.randn(2, count, device=rows.device))
    wide, narrow = (
        rows.kernels.dlogits_(Tile(logits.clone(), target, PLAIN), stats, outer, dtype)
        for dtype in (FP32, FP16)
    )
    assert torch.equal(wide.to(FP16), narrow)


def test_offsets_beyond_32_bits(rows):
    """Two rows 2**31 elements apart, in an allocation of which only they are touched."""
    if rows.interpreted:
        pytest.skip("the interpreter copies whole storages")
    columns, stride = 1007, 2**31 + 64
    near, target = tile(rows, 2, columns, BF16)
    storage = torch.empty(stride + columns, dtype=BF16, device=rows.device)
    far = storage.as_strided((2, columns), (stride, 1)).copy_(near)
    outer = StatsGradients(*torch.ones(2, 2, device=rows.device))
    results = []
    for logits in (near, far):
        apart = Tile(logits, target, PLAIN)
        stats = rows.kernels.stats(apart, extras=False)
        got = rows.kernels.dlogits_(apart, stats, outer, BF16)
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
