"""The fused forward against fp64, interpreted where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from triton import knobs

from grpo_kernels import linear_logprobs
from grpo_kernels.backends import RowStats, triton
from grpo_kernels.backends.configs import LinearCase, LinearConfig
from grpo_kernels.backends.configs import linear as linear_tiles
from grpo_kernels.backends.triton import linear_launch
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import poisoned_allocations

# the interpreter computes with numpy, which warns where a GPU gives inf or NaN without a word
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")

# many splits, groups and steps over D at small sizes
SMALL = LinearConfig(16, 32, 16, 4, 2, subtiles=2, tiles=2, group=2, descriptors=0)


def linear_stats(hidden: Tensor, head: Head, target: Tensor, extras: bool, **options) -> RowStats:
    options = {"precision": "fp32", "extras": extras, **options}
    return linear_launch.linear_stats(hidden, head, target, **options)


HEADS = {
    "plain": Transform(),
    "scaled": Transform(logit_scale=0.3, temperature=0.7),
    "softcapped": Transform(softcap=3.0, temperature=1.3),
}


@pytest.fixture
def device(device: torch.device) -> torch.device:
    if device.type == "cpu" and not knobs.runtime.interpret:
        pytest.skip("the interpreter is off")
    return device


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearCase, "config", SMALL)
    monkeypatch.setattr(linear_tiles, "UNALIGNED_CONFIG", SMALL)


def problem(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden, weight, bias, target; every other row likes its target."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    hidden = torch.randn(rows, depth, generator=generator)
    weight = torch.randn(columns, depth, generator=generator)
    target = torch.randint(columns, (rows,), generator=generator)
    hidden[::2] += 2 * weight[target[::2]] / depth**0.5
    bias = torch.randn(columns, generator=generator)
    values = (x.to(device, dtype) for x in (hidden, weight, bias))
    return (*values, target.to(device))


def fields(*stats: RowStats) -> list[tuple[Tensor, ...]]:
    """Return the fields that both have, pair by pair."""
    return [pair for pair in zip(*stats, strict=True) if all(x is not None for x in pair)]


def exact(hidden: Tensor, head: Head, target: Tensor, dtype: torch.dtype) -> RowStats:
    """Compute eager statistics in ``dtype``."""
    transform = head.transform
    z = hidden.to(dtype) @ head.weight.to(dtype).t()
    if head.bias is not None:
        z = z + head.bias.to(dtype)
    z = z * transform.logit_scale
    if transform.softcap is not None:
        z = transform.softcap * torch.tanh(z / transform.softcap)
    temperature = transform.temperature
    z = z / (temperature[:, None].to(dtype) if isinstance(temperature, Tensor) else temperature)
    logps = z.log_softmax(-1)
    p = logps.exp()
    return RowStats(
        logps.gather(-1, target[:, None])[:, 0],
        -(p * logps).sum(-1),
        z.logsumexp(-1),
        z.argmax(-1) == target,
        p.square().sum(-1),
        z.amax(-1),
        z.amin(-1),
    )


def check(hidden: Tensor, head: Head, target: Tensor) -> RowStats:
    got = linear_stats(hidden, head, target, extras=True)
    lean = linear_stats(hidden, head, target, extras=False)
    assert all(torch.equal(a, b) for a, b in fields(lean, got))
    want, eager = (exact(hidden, head, target, x) for x in (torch.float64, torch.float32))
    for name in ("logp", "entropy", "lse", "sum_sq_probs", "max_logit", "min_logit"):
        value, true = getattr(got, name).double(), getattr(want, name)
        allowed = 2 * (getattr(eager, name).double() - true).abs().max().item() + 2e-6
        assert (value - true).abs().max().item() <= allowed, name
    assert torch.equal(got.is_top1, want.is_top1)
    return got


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("transform", HEADS)
@pytest.mark.parametrize("with_bias", (False, True))
def test_values(dtype, transform, with_bias, device, small_tiles) -> None:
    hidden, weight, bias, target = problem(53, 200, 40, dtype, device)
    check(hidden, Head(weight, bias if with_bias else None, HEADS[transform]), target)


@pytest.mark.parametrize("rows", (1, 16, 33))
@pytest.mark.parametrize("columns", (1, 17, 64, 129))
@pytest.mark.parametrize("depth", (1, 5, 32))
def test_odd_shapes(rows: int, columns: int, depth: int, device, small_tiles) -> None:
    hidden, weight, _, target = problem(rows, columns, depth, torch.bfloat16, device)
    check(hidden, Head(weight, None, Transform()), target)


def test_default_tiles(device) -> None:
    hidden, weight, _, target = problem(130, 4096 + 77, 72, torch.bfloat16, device)
    check(hidden, Head(weight, None, Transform()), target)


def test_temperature_of_each_row(device, small_tiles) -> None:
    hidden, weight, _, target = problem(35, 100, 24, torch.bfloat16, device)
    temperature = torch.linspace(0.5, 2.0, 35, device=device)
    check(hidden, Head(weight, None, Transform(temperature=temperature)), target)


def test_first_of_equal_columns_is_the_top(device, small_tiles) -> None:
    hidden, weight = torch.ones(3, 16), torch.zeros(300, 16)
    weight[[40, 41, 250]] = 1.0
    hidden, weight = hidden.to(device, torch.bfloat16), weight.to(device, torch.bfloat16)
    target = torch.tensor([40, 41, 250], device=device)
    got = linear_stats(hidden, Head(weight, None, Transform()), target, extras=True)
    assert got.is_top1.tolist() == [True, False, False]


@pytest.mark.parametrize("precision", ("fp32", "input"))
def test_a_row_keeps_its_bits_in_every_batch(precision, device, small_tiles) -> None:
    hidden, weight, _, target = problem(70, 150, 24, torch.bfloat16, device)
    temperature = torch.linspace(0.5, 2.0, 70, device=device)
    shuffled, padded = torch.randperm(70, device=device), torch.arange(80, device=device) % 70
    parts = (slice(0, 1), slice(3, 40), slice(69, 70), shuffled, padded)

    def run(rows: slice | Tensor) -> RowStats:
        head = Head(weight, None, Transform(temperature=temperature[rows]))
        return linear_stats(hidden[rows], head, target[rows], True, precision=precision)

    whole = run(slice(None))
    for rows in parts:
        assert all(torch.equal(a, b[rows]) for a, b in fields(run(rows), whole))


def test_long_batches_run_in_chunks(device, small_tiles, monkeypatch) -> None:
    hidden, weight, bias, target = problem(70, 300, 40, torch.bfloat16, device)
    head = Head(weight, bias, Transform(temperature=torch.linspace(0.5, 2.0, 70, device=device)))
    whole = linear_stats(hidden, head, target, extras=True)
    monkeypatch.setattr(linear_launch, "_PARTIAL_BYTES", 0)
    monkeypatch.setattr(linear_launch, "_CHUNK_ROWS", 32)
    pieces = linear_stats(hidden, head, target, extras=True)
    assert all(torch.equal(a, b) for a, b in fields(pieces, whole))


@pytest.mark.parametrize("change", ({"descriptors": 1}, {"group": 5}, {"flat": 1}))
def test_what_changes_no_bits(change, device) -> None:
    """On a GPU the copy engine exists from Hopper on, and a pipeline may not change a result."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("no copy engine")
    hidden, weight, bias, target = problem(53, 200, 40, torch.bfloat16, device)
    config = SMALL if device.type == "cpu" else LinearConfig(64, 64, 32, 4, 2, 2, 2, 2, 0)
    head, other = Head(weight, bias, Transform()), dataclasses.replace(config, **change)
    want, got = (linear_stats(hidden, head, target, False, config=x) for x in (config, other))
    assert all(torch.equal(a, b) for a, b in fields(got, want))


def test_nothing_uninitialised_is_read(device, small_tiles) -> None:
    hidden, weight, _, target = problem(33, 90, 24, torch.bfloat16, device)
    with poisoned_allocations():
        got = linear_stats(hidden, Head(weight, None, Transform()), target, extras=True)
    assert all(x.isfinite().all() for x in got[:7])


def test_nan_stays_in_its_row(device, small_tiles) -> None:
    hidden, weight, _, target = problem(35, 100, 24, torch.bfloat16, device)
    head = Head(weight, None, Transform(softcap=5.0))
    clean = linear_stats(hidden, head, target, extras=True)
    hidden[7, 3] = float("nan")
    got = linear_stats(hidden, head, target, extras=True)
    others = torch.arange(35, device=device) != 7
    for name, value, want in zip(got._fields[:7], got, clean, strict=False):
        assert torch.equal(value[others], want[others]), name
        assert name == "is_top1" or value[7].isnan(), name


@pytest.mark.parametrize("with_bias", (False, True))
def test_logits_rounded_to_the_input_dtype(with_bias, device, small_tiles) -> None:
    """Values whose products are exact, so that only the rounding in question is left."""
    hidden, weight, bias, target = problem(35, 100, 24, torch.float16, device)
    hidden, weight = (x.mul(64).round().div(64) for x in (hidden, weight))
    head = Head(weight, bias if with_bias else None, HEADS["scaled"])
    got = linear_stats(hidden, head, target, True, precision="input")
    z = (hidden.float() @ weight.float().t()).half()
    if with_bias:
        z += bias
    # the same head, its rounded logits handed over by an identity
    rows = torch.eye(35, dtype=torch.float64, device=device)
    want = exact(rows, Head(z.double().t(), None, head.transform), target, torch.float64)
    for name in ("logp", "entropy", "lse", "sum_sq_probs", "max_logit", "min_logit"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), rtol=1e-5, atol=1e-5, msg=name
        )
    unrounded = linear_stats(hidden, head, target, extras=False)
    assert not torch.allclose(unrounded.lse.double(), want.lse, rtol=1e-5, atol=1e-5)


def test_strided_inputs(device, small_tiles) -> None:
    hidden, weight, bias, target = problem(20, 90, 24, torch.bfloat16, device)
    head = Head(weight, None, Transform())
    wide = torch.full((20, 50), float("nan"), dtype=hidden.dtype, device=device)
    wide[:, :24] = hidden
    want = linear_stats(hidden, head, target, extras=False)
    odd = torch.empty(20 * 24 + 1, dtype=hidden.dtype, device=device)[1:].view(20, 24)
    odd.copy_(hidden)
    transposed = weight.t().contiguous().t()
    for x, w in ((wide[:, :24], weight), (odd, weight), (hidden, transposed)):
        got = linear_stats(x, Head(w, None, Transform()), target, extras=False)
        assert all(torch.equal(a, b) for a, b in fields(got, want))
    gaps = torch.full((90, 33), float("nan"), dtype=weight.dtype, device=device)[:, :24]
    gaps.copy_(weight)  # rows that are not on 16-byte boundaries
    check(hidden, Head(gaps, None, Transform()), target)
    check(wide[:1, :24], Head(gaps, None, Transform()), target[:1])
    check(hidden, Head(weight, bias.repeat_interleave(2)[::2], Transform()), target)


def test_extreme_logits(device, small_tiles) -> None:
    hidden, weight, bias, target = problem(20, 90, 24, torch.bfloat16, device)
    for offset in (-3e4, 3e4):
        shifted = torch.full_like(bias, offset)
        check(hidden, Head(weight, shifted, Transform()), target)
    masked = bias.float()
    masked[5:60] = float("-inf")
    got = linear_stats(hidden, Head(weight, masked, Transform()), target, extras=False)
    want = exact(hidden, Head(weight, masked, Transform()), target, torch.float64)
    torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=1e-5)
    assert got.entropy.isfinite().all()


def test_no_rows(device) -> None:
    hidden, weight, _, target = problem(2, 90, 24, torch.bfloat16, device)
    got = linear_stats(hidden[:0], Head(weight, None, Transform()), target[:0], extras=True)
    assert all(value.shape == (0,) for value in got[:7])


def test_it_is_the_forward_of_the_op(device, monkeypatch) -> None:
    hidden, weight, _, target = problem(9, 90, 24, torch.bfloat16, device)
    seen, original = [], triton.linear_stats
    monkeypatch.setattr(
        triton, "linear_stats", lambda *arguments: seen.append(1) or original(*arguments)
    )
    linear_logprobs(hidden.float(), weight.float(), target, backend="triton")
    assert not seen
    for precision in ("fp32", "input"):
        linear_logprobs(hidden, weight, target, backend="triton", precision=precision)
    assert len(seen) == 2


def test_extra_memory_is_small(device) -> None:
    if device.type != "cuda":
        pytest.skip("counts the CUDA allocator's bytes")
    hidden, weight, _, target = problem(4096, 32000, 256, torch.bfloat16, device)
    head = Head(weight, None, Transform())
    linear_stats(hidden, head, target, extras=False)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_stats(hidden, head, target, extras=False)
    assert torch.cuda.max_memory_allocated() - before < 4 << 20


def test_offsets_beyond_32_bits(device) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter copies whole storages; needs 5 GB on a GPU")
    hidden, weight, _, target = problem(40, 300, 64, torch.bfloat16, device)
    apart = torch.empty(300, 2**31 // 256, dtype=torch.bfloat16, device=device)[:, :64]
    apart.copy_(weight)
    check(hidden, Head(apart, None, Transform()), target)
