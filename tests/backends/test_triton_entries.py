"""Triton's kernels of entries against plain torch's, which choose the same ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from grpo_kernels.backends import Tile
from grpo_kernels.backends.chunked import TORCH_ROWS
from grpo_kernels.backends.entries import TORCH_ENTRIES, WHOLE, Entries, row_keys
from grpo_kernels.backends.triton import TRITON_ENTRIES
from grpo_kernels.head import Transform

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = Transform()
TRANSFORMS = {
    "plain": PLAIN,
    "scale": Transform(logit_scale=0.5, temperature=0.8),
    "softcap": Transform(softcap=5.0),
    "rows": Transform(1.5, 20.0, torch.tensor([0.4, 0.7, 1.0, 1.3, 2.0])),
}


def tile(device: torch.device, columns: int, dtype: torch.dtype, transform: Transform) -> Tile:
    """Return five rows, every other one with its argmax as target; columns lie apart by rows."""
    logits = (4 * torch.randn(5, columns)).to(dtype)
    target = torch.randint(columns, (5,))
    target[::2] = logits[::2].float().argmax(-1)
    storage = torch.full((5, columns + 3), torch.nan, dtype=dtype, device=device)
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        transform = replace(transform, temperature=temperature.to(device))
    return Tile(storage[:, :columns].copy_(logits), target.to(device), transform)


def extracted(
    tile: Tile, tolerance: float, slots: int, scale: float = 1.0
) -> tuple[Entries, Entries]:
    """Return plain torch's and Triton's entries, for errors of ``tolerance`` of each gradient."""
    stats = TORCH_ROWS.stats(tile, False)
    keys = row_keys(7, stats.lse)
    allowed = torch.full_like(stats.logp, tolerance * scale)
    return tuple(  # type: ignore[return-value]
        kernels.extract(tile, stats, keys, allowed, slots)
        for kernels in (TORCH_ENTRIES, TRITON_ENTRIES)
    )


def assert_alike(want: Entries, got: Entries, rtol: float = 2e-5) -> None:
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert got.used.tolist() == want.used.tolist()
    meant = torch.arange(want.columns, device=want.used.device) < want.used[:, None]
    assert torch.equal(got.ids[meant], want.ids[meant])
    torch.testing.assert_close(got.values[meant], want.values[meant], rtol=rtol, atol=1e-30)
    for name in ("error", "error_l1", "norm"):
        a, b = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-30, msg=name)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("columns", [1, 17, 2048, 2500])
def test_the_same_entries(device: torch.device, columns: int, dtype: torch.dtype) -> None:
    assert_alike(*extracted(tile(device, columns, dtype, PLAIN), 1e-2, columns + 1))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(device: torch.device, name: str) -> None:
    logits = tile(device, 2060, FP32, TRANSFORMS[name])
    for tolerance in (1e-5, 1e-1):
        assert_alike(*extracted(logits, tolerance, 2061))


@pytest.mark.parametrize("tolerance", [0.0, 1e-30, 1e30, torch.inf])
def test_tolerances_of_any_size(device: torch.device, tolerance: float) -> None:
    want, got = extracted(tile(device, 129, FP32, PLAIN), tolerance, 129)
    assert got.used.tolist() == want.used.tolist() == [1 if tolerance > 1 else 129] * 5


@pytest.mark.parametrize("lead", [5.0, 60.0])
def test_rows_that_are_nearly_certain(device: torch.device, lead: float) -> None:
    """Their sizes are tiny, as is what they are allowed."""
    logits = tile(device, 700, FP32, PLAIN)
    logits.logits[torch.arange(5), logits.target] = logits.logits.amax(1) + lead
    norm = extracted(logits, 0.0, 700)[0].norm.min().item()
    for tolerance in (1e-3, 1e-1):
        assert_alike(*extracted(logits, tolerance, 701, scale=norm))


def test_saturated_softcap(device: torch.device) -> None:
    """All but a few sizes are nearly 0: their sum is far below 1 - p, which the unit is made of."""
    logits = tile(device, 900, FP32, Transform(softcap=1.0))
    logits.logits.mul_(4)
    norm = extracted(logits, 0.0, 900)[0].norm.min().item()
    for tolerance in (1e-2, 1e-1):
        assert_alike(*extracted(logits, tolerance, 901, scale=norm), rtol=1e-3)


def test_rows_that_are_whole(device: torch.device) -> None:
    """Their number does not decide which entries the others have; an offset changes nothing."""
    logits = tile(device, 1300, FP32, PLAIN)
    logits.logits[0] *= 0.01
    logits.logits[1, 0] = torch.nan
    logits.logits[2, 1] = torch.inf
    logits.logits[3] += 1e4
    want, got = extracted(logits, 1e-2, 150)
    assert got.used[:3].tolist() == [WHOLE] * 3 and (got.used[3:] > 1).all()
    assert_alike(want, got)
    assert all(x[1] == 0 for x in (got.error, got.error_l1, got.norm))
    roomy = extracted(logits, 1e-2, 1301)[1]
    for row in (3, 4):
        used = int(got.used[row])
        assert torch.equal(got.ids[row, :used], roomy.ids[row, :used])


def test_never_more_than_the_slots(device: torch.device) -> None:
    logits = tile(device, 500, FP32, PLAIN)
    used = extracted(logits, 3e-2, 501)[0].used
    for slots in (1, int(used.min()) - 1, int(used.median()) + 8):
        want, got = extracted(logits, 3e-2, slots)
        assert got.used.tolist() == want.used.tolist()
        assert got.used.max() <= slots


def test_the_same_bits_in_any_batch(device: torch.device) -> None:
    logits = tile(device, 1100, BF16, PLAIN)
    stats = TORCH_ROWS.stats(logits, False)
    keys = row_keys(7, stats.lse)
    allowed = torch.full_like(stats.logp, 1e-2)
    whole, again = (TRITON_ENTRIES.extract(logits, stats, keys, allowed, 300) for _ in range(2))
    for row in (0, 3):
        one = slice(row, row + 1)
        alone = TRITON_ENTRIES.extract(
            logits.rows(one), stats.rows(one), keys[one], allowed[one], 300
        )
        used = int(alone.used[0])
        assert used > 0
        for other in (whole, again):
            assert all(
                torch.equal(
                    a[0, :used] if a.dim() == 2 else a[0], b[row, :used] if b.dim() == 2 else b[row]
                )
                for a, b in zip(alone, other, strict=True)
            )


def product(device: torch.device) -> tuple[Entries, Tensor, Tensor]:
    """Return entries of 70 rows of 50 columns, their factors, and the dense (70, 50) of both."""
    used = torch.randint(0, 24, (70,))
    used[:20], used[20] = 24, WHOLE
    ids = torch.stack([torch.randperm(50)[:24] for _ in range(70)]).int()
    ids[:, 3] = torch.where(used > 3, 50 - 1, ids[:, 3])  # one column has most of the rows
    values, factor = torch.randn(70, 24), torch.randn(70)
    factor[7] = 0
    dense = torch.zeros(70, 50, dtype=torch.float64)
    meant = torch.arange(24) < used[:, None]
    rows = meant.nonzero()[:, 0]
    weights = (values * factor[:, None])[meant].double()
    dense.index_put_((rows, ids[meant].long()), weights, accumulate=True)
    ids[~meant], values[~meant] = -(1 << 30), torch.nan  # not read
    moved = (x.to(device) for x in (ids, values, used.int()))
    return Entries(*moved, factor, factor, factor), factor.to(device), dense.to(device)


def rows_of(matrix: Tensor) -> Tensor:
    """Return the same with gaps of NaN between the rows."""
    storage = matrix.new_full((matrix.shape[0], matrix.shape[1] + 5), torch.nan)
    return storage[:, : matrix.shape[1]].copy_(matrix)


@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("columns", [37, 300])
def test_matmul(device: torch.device, columns: int, out_dtype: torch.dtype) -> None:
    entries, factor, dense = product(device)
    matrix = rows_of(torch.randn(50, columns, device=device).to(out_dtype))
    out = rows_of(torch.full((70, columns), 7.0, dtype=out_dtype, device=device))
    TRITON_ENTRIES.matmul(entries, factor, matrix, out)
    want = dense @ matrix.double()
    want[20] = 7.0  # as it was
    # the interpreter truncates to bf16
    torch.testing.assert_close(out.double(), want, rtol=tolerance_of(out_dtype), atol=1e-5)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("out_dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("columns", [37, 300])
def test_transposed_matmul(
    device: torch.device, columns: int, out_dtype: torch.dtype, add: bool
) -> None:
    entries, factor, dense = product(device)
    rows = rows_of(torch.randn(70, columns, device=device).to(BF16))
    before = torch.randn(55, columns, device=device).to(out_dtype)  # the last five have no entries
    out = rows_of(before if add else torch.full_like(before, torch.nan))
    again = out.clone()
    TRITON_ENTRIES.transposed_matmul(entries, factor, rows, out, add)
    want = torch.nn.functional.pad(dense.t() @ rows.double(), (0, 0, 0, 5))
    want += before.double() if add else 0
    torch.testing.assert_close(out.double(), want, rtol=tolerance_of(out_dtype), atol=1e-5)
    TRITON_ENTRIES.transposed_matmul(entries, factor, rows, again, add)
    assert torch.equal(out, again)


def tolerance_of(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == FP32 else torch.finfo(dtype).eps


def test_nothing_to_do(device: torch.device) -> None:
    logits = tile(device, 40, FP32, PLAIN).rows(slice(0, 0))
    want, got = extracted(logits, 1e-2, 8)
    assert_alike(want, got)
    out = torch.ones(40, 9, device=device)
    none = torch.empty(0, device=device)
    TRITON_ENTRIES.transposed_matmul(got, none, torch.empty(0, 9, device=device), out, add=True)
    assert (out == 1).all()
    TRITON_ENTRIES.transposed_matmul(got, none, torch.empty(0, 9, device=device), out, add=False)
    assert (out == 0).all()
    TRITON_ENTRIES.matmul(got, none, out, torch.empty(0, 9, device=device))
