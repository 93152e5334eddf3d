"""Triton row kernels against fp64 autograd of log_softmax, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from grpo_kernels.backends import RowStats, StatsGradients, Tile
from grpo_kernels.backends.triton import TRITON_ROWS
from grpo_kernels.head import Transform

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

# one, few, an odd count, and more than one tile of 4096 by an odd count
COLUMNS = (1, 5, 1007, 4096 + 77)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cpu" and not knobs.runtime.interpret:
        pytest.skip("the interpreter is off")
    return device


def eager(x: Tensor, target: Tensor, transform: Transform) -> tuple[Tensor, ...]:
    """Compute the fields of RowStats in x's dtype, differentiable."""
    z = x * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature[:, None].to(x.dtype)
    z = z / temperature
    logq = z.log_softmax(-1)
    p = logq.exp()
    plogp = p * torch.where(p > 0, logq, 0.0)
    top = z.argmax(-1) if x.numel() else target
    logp = logq.gather(-1, target[:, None])[:, 0]
    largest, least = (z.amax(-1), z.amin(-1)) if x.numel() else (logp, logp)
    lse = z.logsumexp(-1)
    return logp, -plogp.sum(-1), lse, top == target, p.square().sum(-1), largest, least


def eager_dlogits(
    x: Tensor, target: Tensor, transform: Transform, dlogp: Tensor, dentropy: Tensor | None
) -> Tensor:
    x = x.detach().requires_grad_()
    logp, entropy, *_ = eager(x, target, transform)
    loss = (logp * dlogp.to(x.dtype)).sum()
    if dentropy is not None:
        loss = loss + (entropy * dentropy.to(x.dtype)).sum()
    return torch.autograd.grad(loss, x)[0]


def assert_twice_eager(ours: Tensor, eager32: Tensor, exact: Tensor, slack: float = 0.0) -> None:
    """Allow twice eager's largest error, or an ulp of the largest value."""
    assert torch.isfinite(ours).all()
    if not exact.numel():
        return
    ulp = torch.finfo(torch.float32).eps * max(exact.abs().max().item(), 1e-3)
    error = (ours.double() - exact).abs().max().item()
    allowed = 2 * (eager32.double() - exact).abs().max().item() + ulp
    assert error <= allowed + slack, (error, allowed, slack)


def check(
    logits: Tensor,
    target: Tensor,
    transform: Transform = Transform(),  # noqa: B008
    out_dtype: torch.dtype | None = None,
    with_entropy: bool = True,
) -> RowStats:
    """Check statistics and gradient of one tile; return the statistics."""
    out_dtype = out_dtype or logits.dtype
    x32, x64 = logits.float(), logits.double()
    before, whole = logits.clone(), Tile(logits, target, transform)
    stats = TRITON_ROWS.stats(whole, extras=True)
    assert torch.equal(logits, before)
    lean = TRITON_ROWS.stats(whole, extras=False)
    assert lean[3:] == (None,) * len(lean[3:])
    assert all(torch.equal(a, b) for a, b in zip(lean[:3], stats[:3], strict=True))

    want32, want64 = eager(x32, target, transform), eager(x64, target, transform)
    for name in ("logp", "entropy", "lse", "sum_sq_probs"):
        index = RowStats._fields.index(name)
        assert_twice_eager(stats[index], want32[index], want64[index])
    assert torch.equal(stats.is_top1, want32[3])
    for got, want in zip((stats.max_logit, stats.min_logit), want64[5:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert (stats.entropy >= 0).all()

    generator = torch.Generator().manual_seed(3)
    rows = logits.shape[0]
    dlogp = torch.randn(rows, generator=generator).to(logits.device)
    dentropy = torch.randn(rows, generator=generator).to(logits.device) if with_entropy else None
    got = TRITON_ROWS.dlogits_(whole, stats, StatsGradients(dlogp, dentropy), out_dtype)
    assert got.dtype == out_dtype and got.shape == logits.shape
    assert got.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    exact = eager_dlogits(x64, target, transform, dlogp, dentropy)
    slack = 0.0
    if out_dtype != torch.float32 and exact.numel():
        # rounded once to the output's dtype; the interpreter truncates, which is one ulp
        slack = torch.finfo(out_dtype).eps * exact.abs().max().item()
    assert_twice_eager(got, eager_dlogits(x32, target, transform, dlogp, dentropy), exact, slack)
    return stats


def tile(
    rows: int, columns: int, device: torch.device, scale: float = 4.0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    logits = torch.randn(rows, columns, generator=generator) * scale
    target = torch.randint(columns, (rows,), generator=generator)
    return logits.to(device), target.to(device)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", (0, 1, 3))
def test_values_and_gradient(rows: int, columns: int, device: torch.device) -> None:
    check(*tile(rows, columns, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_entropy", (False, True))
def test_dtypes(dtype: torch.dtype, with_entropy: bool, device: torch.device) -> None:
    logits, target = tile(3, 1007, device)
    check(logits.to(dtype), target, with_entropy=with_entropy)


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("columns", COLUMNS)
def test_16_bit_gradient_lives_in_the_first_half_of_each_row(
    columns: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    logits, target = tile(3, columns, device)
    second_half = logits.view(out_dtype)[:, columns:].clone()
    check(logits, target, out_dtype=out_dtype)
    assert torch.equal(
        logits.view(out_dtype)[:, columns:].view(torch.int16), second_half.view(torch.int16)
    )


@pytest.mark.parametrize("offset", (-150.0, 150.0, 1e4))
@pytest.mark.parametrize("columns", (5, 4096 + 77))
def test_offset_logits(offset: float, columns: int, device: torch.device) -> None:
    logits, target = tile(3, columns, device)
    check(logits + offset, target)


@pytest.mark.parametrize("margin", (10.0, 20.0, 60.0, 200.0))
def test_target_near_certainty(margin: float, device: torch.device) -> None:
    logits, target = tile(3, 1007, device, scale=0.5)
    logits[torch.arange(3, device=device), target] += margin
    stats = check(logits, target)
    assert stats.is_top1.all()


@pytest.mark.parametrize("offset", (0.0, 150.0))
def test_improbable_target(offset: float, device: torch.device) -> None:
    logits, target = tile(3, 1007, device, scale=0.5)
    logits[torch.arange(3, device=device), target] -= 63.0  # p ~ 1e-30
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=False)
    assert (stats.logp < -68).all()
    check(logits + offset, target)


TRANSFORMS = {
    "scale": Transform(logit_scale=0.25),
    "temperature": Transform(temperature=0.7),
    "softcap": Transform(softcap=5.0),
    "all": Transform(logit_scale=1.5, softcap=30.0, temperature=0.6),
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("columns", (1, 1007))
def test_transform(name: str, columns: int, device: torch.device) -> None:
    logits, target = tile(3, columns, device)
    check(logits, target, TRANSFORMS[name])


@pytest.mark.parametrize("softcap", (None, 8.0))
def test_row_temperature(softcap: float | None, device: torch.device) -> None:
    logits, target = tile(3, 1007, device)
    temperature = torch.tensor([0.5, 1.0, 1.7], device=device)
    check(logits, target, Transform(2.0, softcap, temperature))
    few = Tile(logits, target, Transform(temperature=temperature[:2]))
    with pytest.raises(ValueError, match="temperature: expected"):
        TRITON_ROWS.stats(few, False)


@pytest.mark.parametrize("extra", (1, 13))
@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16))
def test_strided_rows_leave_the_padding_alone(
    extra: int, out_dtype: torch.dtype, device: torch.device
) -> None:
    values, target = tile(3, 1007, device)
    buffer = torch.full((3, 1007 + extra), float("nan"), device=device)
    logits = buffer[:, :1007]
    logits.copy_(values)
    check(logits, target, out_dtype=out_dtype)
    assert buffer[:, 1007:].isnan().all()


def test_minus_infinity_logits(device: torch.device) -> None:
    """Columns with -inf, one of them a whole first tile, carry no probability and no gradient."""
    logits, target = tile(3, 2 * 4096 + 5, device)
    logits[0, ::2] = float("-inf")
    logits[1, :4096] = float("-inf")
    logits[2, :-1] = float("-inf")
    target = torch.tensor([1, 5000, 2 * 4096 + 4], device=device)
    stats = check(logits, target)
    assert stats.logp[2] == 0 and stats.entropy[2] == 0


def test_target_of_probability_zero(device: torch.device) -> None:
    logits, target = tile(1, 7, device)
    logits[0, target] = float("-inf")
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=True)
    assert stats.logp.item() == float("-inf") and not stats.is_top1.item()
    one = torch.ones(1, device=device)
    want = -logits.softmax(-1)
    want[0, target] = 1.0
    whole = Tile(logits, target, Transform())
    got = TRITON_ROWS.dlogits_(whole, stats, StatsGradients(one), torch.float32)
    assert torch.allclose(got, want, atol=1e-6)


@pytest.mark.parametrize("name", ("temperature", "all"))
def test_gradient_of_a_slice_of_the_vocabulary(name: str, device: torch.device) -> None:
    """With the statistics of the whole; the target lies in one slice, outside of the others."""
    logits, target = tile(4, 1007, device)
    target[:2] = torch.tensor([3, 1006], device=device)
    transform, vectors = TRANSFORMS[name], torch.randn(2, 4, device=device)
    stats = TRITON_ROWS.stats(Tile(logits, target, transform), extras=False)
    exact = eager_dlogits(logits.double(), target, transform, *vectors)
    for columns in (slice(0, 5), slice(5, 600), slice(600, 1007)):
        part = Tile(logits[:, columns].clone(), target - columns.start, transform)
        got = TRITON_ROWS.dlogits_(part, stats, StatsGradients(*vectors), torch.float32)
        torch.testing.assert_close(got.double(), exact[:, columns], rtol=1e-4, atol=1e-6)


def test_nan_spreads_through_its_own_row_only(device: torch.device) -> None:
    logits, target = tile(3, 1007, device)
    logits[1, 500] = float("nan")
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=True)
    for values in (*stats[:3], *stats[4:7]):
        assert values.isnan().tolist() == [False, True, False]


def test_top1_is_the_first_of_equal_maxima(device: torch.device) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[:, [40, 4500]] = 3.0
    target = torch.tensor([40, 4500, 7], device=device)
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=True)
    assert stats.is_top1.tolist() == [True, False, False]


@pytest.mark.parametrize("out_dtype", (torch.float32, torch.bfloat16))
def test_rows_without_weight_give_exact_zeros(out_dtype: torch.dtype, device: torch.device) -> None:
    logits, target = tile(3, 1007, device)
    logits[1] = float("nan")
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=False)
    weight = torch.tensor([0.5, 0.0, 0.0], device=device)
    dentropy = torch.tensor([0.0, 0.0, 0.25], device=device)
    whole = Tile(logits, target, Transform())
    got = TRITON_ROWS.dlogits_(whole, stats, StatsGradients(weight, dentropy), out_dtype)
    assert got[0].any() and got[2].any()
    assert torch.equal(got[1], torch.zeros_like(got[1]))


def test_rows_do_not_depend_on_their_neighbours(device: torch.device) -> None:
    logits, target = tile(5, 1007, device)
    whole = Tile(logits, target, Transform())
    together = TRITON_ROWS.stats(whole, extras=True)
    for row in range(5):
        part = slice(row, row + 1)
        alone = TRITON_ROWS.stats(whole.rows(part), extras=True)
        assert all(torch.equal(a[part], b) for a, b in zip(together[:7], alone[:7], strict=True))


def test_narrowing_in_place_is_the_rounded_fp32_gradient(device: torch.device) -> None:
    """Bit for bit: a store that overtook a load of the same row would show. Large on a GPU."""
    rows, columns = (3, 4096 + 77) if device.type == "cpu" else (2000, 50_001)
    logits, target = tile(rows, columns, device)
    stats = TRITON_ROWS.stats(Tile(logits, target, Transform()), extras=False)
    outer = StatsGradients(*torch.randn(2, rows, device=device))
    wide, narrow = (
        TRITON_ROWS.dlogits_(Tile(logits.clone(), target, Transform()), stats, outer, dtype)
        for dtype in (torch.float32, torch.float16)
    )
    assert torch.equal(wide.to(torch.float16), narrow)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter copies whole storages; needs 9 GB on a GPU")
    values, target = tile(2, 1007, device)
    logits = torch.empty(2, 2**31 + 64, dtype=torch.bfloat16, device=device)[:, :1007]
    logits.copy_(values)
    check(logits, target)


def test_unsuitable_arguments_are_named(device: torch.device) -> None:
    logits, target = tile(3, 8, device)
    with pytest.raises(ValueError, match="logits: expected one of"):
        TRITON_ROWS.stats(Tile(logits.double(), target, Transform()), False)
    with pytest.raises(ValueError, match="contiguous columns"):
        TRITON_ROWS.stats(Tile(logits.t(), target, Transform()), False)
    with pytest.raises(ValueError, match="target: expected"):
        TRITON_ROWS.stats(Tile(logits, target[:2], Transform()), False)
    whole = Tile(logits, target, Transform())
    stats = TRITON_ROWS.stats(whole, False)
    with pytest.raises(ValueError, match="out_dtype: expected"):
        TRITON_ROWS.dlogits_(whole, stats, StatsGradients(stats.logp), torch.float64)
