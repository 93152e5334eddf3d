"""The row kernels against fp64 and autograd: native ones of every ISA, and Triton's."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad, Tile, output_view
from grpo_kernels.backends.base import EXTRAS
from grpo_kernels.head import Transform
from tests.backends.conftest import Kernels
from tests.backends.problems import (
    BF16,
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
    stats, lean = (kernels.backend.stats(tile, extras=extras) for extras in (True, False))
    assert torch.equal(tile.logits, logits)
    assert all(getattr(lean, name) is None for name in EXTRAS)
    assert all(torch.equal(a, b) for a, b in zip(lean[:3], stats[:3], strict=True))
    assert stats.lse.dtype == torch.float64 and (stats.entropy >= 0).all()

    exact, eager = (statistics(logits.to(x), target, transform) for x in (torch.float64, FP32))
    for name in ("logprobs", "entropy", "lse", "sum_sq_probs"):
        assert_twice_eager(*(getattr(x, name) for x in (stats, eager, exact)), name)
    for name in ("max_logit", "min_logit"):
        got, want = getattr(stats, name).double(), getattr(exact, name)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    assert torch.equal(stats.is_top1, eager.is_top1)

    generator = torch.Generator().manual_seed(3)
    vectors = torch.randn(2, len(target), generator=generator).to(logits.device)
    grad_stats = StatsGrad(vectors[0], vectors[1] if with_entropy else None)
    behind = _behind(tile, out_dtype).clone()
    got = kernels.backend.dlogits_(tile, stats, grad_stats, output_view(tile.logits, out_dtype))
    assert got.dtype == out_dtype and got.shape == logits.shape
    assert got.untyped_storage().data_ptr() == tile.logits.untyped_storage().data_ptr()
    assert torch.equal(_behind(tile, out_dtype), behind)
    # rounded once to the output's dtype; the interpreter truncates, which is one ulp
    slack = torch.finfo(out_dtype).eps if out_dtype != FP32 else 0.0
    wide = (dlogits(logits, target, transform, grad_stats, x) for x in (FP32, torch.float64))
    assert_twice_eager(got, *wide, "dlogits", slack)
    return stats


# rows and columns: every size, and every pair of dtypes where there is more than one tile
SHAPES = [
    *(((rows, columns), (FP32, BF16)) for rows, columns in (
        (0, 5), (1, 17), (5, 1), (5, 2), (5, 2048), (3, 151936)
    )),
    *((shape, dtypes) for shape in ((5, 1007), (3, 4096 + 77)) for dtypes in PAIRS),
]  # fmt: skip


@pytest.mark.parametrize("shape,dtypes", SHAPES, ids=str)
def test_matches_fp64(kernels, shape, dtypes):
    count, columns = shape
    if columns > 10_000:
        columns = kernels.size(columns, 32003)
    tile = tile_of(kernels, *random_rows(count, columns, dtypes[0]))
    check(kernels, tile, dtypes[1])


@pytest.mark.parametrize("place,name", enumerate(TRANSFORMS))
@pytest.mark.parametrize("with_entropy", [True, False])
def test_transforms(kernels, name, place, with_entropy):
    """Of one pair of dtypes with the gradient of an entropy, of the next without."""
    dtypes = PAIRS[(place + with_entropy) % len(PAIRS)]
    rows = kernels.size(12, 4)
    transform = transform_of(name, rows, kernels.device)
    tile = tile_of(kernels, *random_rows(rows, 1007, dtypes[0], spread=8.0), transform)
    check(kernels, tile, dtypes[1], with_entropy)


@pytest.mark.parametrize("kind,temperature", zip(SPECIAL_ROWS, itertools.cycle((1.0, 0.7))))
def test_special_rows(kernels, kind, temperature):
    tile = tile_of(kernels, *SPECIAL_ROWS[kind](), Transform(temperature=temperature))
    exact = statistics(tile.logits.double(), tile.target, tile.transform).logprobs
    stats = check(kernels, tile, FP32)
    if kind == "nearly certain" and kernels.native:  # no digits are lost beside the 1 of the target
        torch.testing.assert_close(stats.logprobs.double(), exact, rtol=1e-6, atol=1e-14)


def test_target_of_probability_zero(kernels):
    logits, target = random_rows(1, 7)
    logits[0, target] = -math.inf
    tile = tile_of(kernels, logits, target)
    stats = kernels.backend.stats(tile, extras=False)
    want = torch.nn.functional.one_hot(target, 7) - logits.softmax(-1)
    grad_stats = StatsGrad(torch.ones_like(stats.logprobs))
    got = kernels.backend.dlogits_(tile, stats, grad_stats, tile.logits)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-6)


def test_the_lse_of_a_row_of_minus_inf(kernels):
    """Such a row is a rank's part of a vocabulary, or the tail behind a teacher's first ids."""
    logits, target = random_rows(2, 1007)
    logits[0] = -math.inf
    stats = kernels.backend.stats(tile_of(kernels, logits, target), extras=False)
    assert stats.lse[0] == -math.inf and stats.lse[1].isfinite()


def test_narrowing_in_place_is_the_rounded_fp32_gradient(kernels):
    """Bit for bit: a store that overtook a load of the same row would show. Large on a GPU."""
    count, columns = (2000, 50_001) if kernels.device.type == "cuda" else (3, 4096 + 77)
    tile = tile_of(kernels, *random_rows(count, columns))
    stats = kernels.backend.stats(tile, extras=False)
    grad_stats = StatsGrad(*torch.randn(2, count, device=kernels.device))

    def in_place(dtype: torch.dtype) -> Tensor:
        own = tile._replace(logits=tile.logits.clone())
        return kernels.backend.dlogits_(own, stats, grad_stats, output_view(own.logits, dtype))

    wide, narrow = map(in_place, (FP32, FP16))
    assert torch.equal(wide.to(FP16), narrow)


def test_offsets_beyond_32_bits(kernels):
    """Two rows 2**31 elements apart, in an allocation of which only they are touched."""
    if kernels.interpreted:
        pytest.skip("the interpreter copies whole storages")
    columns, results = 1007, []
    rows = random_rows(2, columns, BF16)
    grad_stats = StatsGrad(*torch.ones(2, 2, device=kernels.device))
    for stride in (1024, 2**31 + 64):
        storage = torch.empty(stride + columns, dtype=BF16, device=kernels.device)
        logits = storage.as_strided((2, columns), (stride, 1)).copy_(rows[0])
        tile = Tile(logits, rows[1].to(kernels.device), PLAIN)
        stats = kernels.backend.stats(tile, extras=False)
        got = kernels.backend.dlogits_(tile, stats, grad_stats, logits)
        results.append((stats.logprobs, stats.entropy, got))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
