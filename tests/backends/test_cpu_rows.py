"""The native row kernels against fp64 and autograd, in every instruction set of this machine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGradients, Tile
from grpo_kernels.backends.cpu import rows as cpu
from grpo_kernels.head import Transform

ISAS = [] if cpu.unavailable() else cpu.isas()
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, FP32), (FP32, BF16), (FP32, FP16), (BF16, BF16), (FP16, FP16)]
TRANSFORMS = {
    "plain": Transform(),
    "temperature": Transform(temperature=0.7),
    "scale": Transform(logit_scale=0.25, temperature=1.3),
    "softcap": Transform(softcap=30.0),
    "all": Transform(logit_scale=1.5, softcap=20.0, temperature=0.6),
}


@pytest.fixture(params=ISAS)
def rows(request: pytest.FixtureRequest) -> cpu.NativeRows:
    return cpu.NativeRows(ISAS.index(request.param))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def eager(
    logits: Tensor,
    target: Tensor,
    transform: Transform,
    grads: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> tuple[RowStats, Tensor]:
    """Compute statistics and logit gradient by autograd, in ``dtype``."""
    logits = logits.detach().to(dtype).requires_grad_()
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)[:, None]
    scores = transform.logit_scale * logits
    if transform.softcap is not None:
        scores = transform.softcap * torch.tanh(scores / transform.softcap)
    scores = scores / temperature
    logps = scores.log_softmax(-1)
    probs = logps.exp()
    logp = logps.gather(-1, target[:, None])[:, 0]
    entropy = -(probs * logps).sum(-1)
    (dlogits,) = torch.autograd.grad((logp, entropy), logits, tuple(g.to(dtype) for g in grads))
    is_top1 = scores.argmax(-1) == target
    extras = (is_top1, probs.square().sum(-1), scores.amax(-1), scores.amin(-1))
    stats = RowStats(logp, entropy, scores.logsumexp(-1), *extras)
    return RowStats(*(x.detach() if x is not None else None for x in stats)), dlogits


def assert_within_twice_eager(actual: Tensor, eager: Tensor, exact: Tensor, what: str) -> None:
    """Allow twice eager's largest error, plus two roundings of the largest value."""
    if exact.numel() == 0:
        return
    slack = 2 * torch.finfo(actual.dtype).eps * exact.abs().max() + torch.finfo(exact.dtype).eps
    error, allowed = ((x.double() - exact).abs().max() for x in (actual, eager))
    assert error <= 2 * allowed + slack, f"{what}: error {error:.3e}, eager's {allowed:.3e}"


def poisoned(logits: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """Return the logits as a view of a wider allocation of NaN, and that allocation."""
    storage = torch.full((logits.shape[0], logits.shape[1] + padding), math.nan, dtype=logits.dtype)
    view = storage[:, : logits.shape[1]]
    view.copy_(logits)
    return view, storage


def check(
    rows: cpu.NativeRows,
    logits: Tensor,
    target: Tensor,
    transform: Transform,
    out_dtype: torch.dtype,
    padding: int = 0,
) -> None:
    """Check statistics and gradient against fp64, and what must stay: the logits, the padding."""
    grads = torch.randn(2, logits.shape[0]).unbind()
    exact_stats, exact_dlogits = eager(logits, target, transform, grads, torch.float64)
    eager_stats, eager_dlogits = eager(logits, target, transform, grads, torch.float32)
    view, storage = poisoned(logits, padding)
    tile = Tile(view, target, transform)
    stats = rows.stats(tile, extras=True)
    assert torch.equal(view, logits)
    assert stats.lse.dtype == torch.float64
    public = stats._replace(lse=stats.lse.float())
    for name in ("logp", "entropy", "lse", "sum_sq_probs", "max_logit", "min_logit"):
        results = (getattr(s, name) for s in (public, eager_stats, exact_stats))
        assert_within_twice_eager(*results, name)
    assert (stats.entropy >= 0).all()
    assert torch.equal(stats.is_top1, logits.float().argmax(-1) == target)
    dlogits = rows.dlogits_(tile, stats, StatsGradients(*grads), out_dtype)
    assert dlogits.dtype == out_dtype and dlogits.shape == logits.shape
    assert dlogits.untyped_storage().data_ptr() == storage.untyped_storage().data_ptr()
    assert_within_twice_eager(dlogits, eager_dlogits.to(out_dtype), exact_dlogits, "dlogits")
    assert storage[:, logits.shape[1] :].isnan().all()


def tile(count: int, vocab: int, dtype: torch.dtype, spread: float = 4.0) -> tuple[Tensor, Tensor]:
    """Return random logits (count, vocab) and targets; every other target is the argmax."""
    logits = (spread * torch.randn(count, vocab)).to(dtype)
    target = torch.randint(vocab, (count,))
    target[::2] = logits[::2].float().argmax(-1)
    return logits, target


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 7, 17, 1000, 2048, 32003])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_matches_fp64(rows, count, vocab, dtypes):
    logits, target = tile(count, vocab, dtypes[0])
    check(rows, logits, target, Transform(), dtypes[1], padding=3)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_large_vocabulary(rows, dtype):
    logits, target = tile(3, 151936, dtype)
    check(rows, logits, target, Transform(temperature=0.9), dtype)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_transforms(rows, transform, dtypes):
    logits, target = tile(5, 1003, dtypes[0], spread=12.0)
    check(rows, logits, target, transform, dtypes[1], padding=1)


def test_temperature_per_row(rows):
    logits, target = tile(6, 1003, FP32)
    temperature = torch.tensor([0.1, 0.5, 1.0, 1.5, 3.0, 100.0])
    for softcap in (None, 25.0):
        check(rows, logits, target, Transform(softcap=softcap, temperature=temperature), FP32)


@pytest.mark.parametrize("offset", [-1e4, -150.0, 150.0, 1e4])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_offset_logits(rows, offset, temperature):
    logits, target = tile(6, 5003, FP32)
    check(rows, logits + offset, target, Transform(temperature=temperature), FP32)


@pytest.mark.parametrize("lead", [12.0, 16.6, 20.0, 60.0, 200.0])
def test_probability_near_one(rows, lead):
    """No digits are lost beside the 1 of the largest term."""
    logits, target = tile(4, 1003, FP32, spread=1.0)
    logits[torch.arange(4), target] = logits.amax(-1) + lead
    check(rows, logits, target, Transform(), FP32)
    exact = logits.double().log_softmax(-1)[torch.arange(4), target]
    logp = rows.stats(Tile(logits, target, Transform()), extras=False).logp
    torch.testing.assert_close(logp.double(), exact, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("depth", [30.0, 60.0, 69.0, 85.0, 120.0])
def test_improbable_target(rows, depth):
    logits, target = tile(4, 1003, FP32, spread=1.0)
    logits[torch.arange(4), target] -= depth
    check(rows, logits, target, Transform(), FP32)


def test_rising_logits_move_the_maximum_in_every_block(rows):
    logits = torch.linspace(-300, 40, 20011).repeat(2, 1)
    check(rows, logits, torch.tensor([20010, 19000]), Transform(), FP32)


def test_top1_is_the_first_of_equal_maxima(rows):
    logits = torch.zeros(3, 5000)
    logits[:, [2100, 4100]] = 1.0
    target = torch.tensor([2100, 4100, 0])
    for transform in (Transform(), Transform(softcap=3.0)):
        is_top1 = rows.stats(Tile(logits, target, transform), extras=True).is_top1
        assert is_top1.tolist() == [True, False, False]


def test_extras_only_when_asked(rows):
    stats = rows.stats(Tile(*tile(2, 9, FP32), Transform()), extras=False)
    assert stats.is_top1 is None and stats.sum_sq_probs is None
    assert stats.max_logit is None and stats.min_logit is None


@pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16])
def test_rows_without_gradient_are_exactly_zero(rows, out_dtype):
    logits, target = tile(4, 1003, FP32)
    stats = rows.stats(Tile(logits, target, Transform()), extras=False)
    dlogp, dentropy = torch.tensor([0.0, 1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, -1.0, 0.0])
    for outer, has_gradient in (
        (StatsGradients(dlogp, dentropy), [False, True, True, False]),
        (StatsGradients(dlogp), [False, True, False, False]),
        (StatsGradients(None, dentropy), [False, False, True, False]),
    ):
        whole = Tile(logits.clone(), target, Transform())
        dlogits = rows.dlogits_(whole, stats, outer, out_dtype)
        assert (dlogits != 0).any(-1).tolist() == has_gradient


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_nan_and_inf(rows, dtypes):
    logits, target = tile(5, 3001, dtypes[0])
    target[:] = 0
    logits[0, 1500] = math.nan
    logits[1, 1500] = math.inf
    logits[2, 1:] = -math.inf
    logits[3, 0] = -math.inf
    logits[3, 1500:] = -math.inf
    one = torch.ones(5)
    stats = rows.stats(Tile(logits, target, Transform()), extras=True)
    copy = Tile(logits.clone(), target, Transform())
    dlogits = rows.dlogits_(copy, stats, StatsGradients(one, one), dtypes[1])
    for row in (0, 1):
        assert stats.logp[row].isnan() and stats.entropy[row].isnan()
        assert dlogits[row].isnan().all()
    assert (stats.logp[2], stats.entropy[2]) == (0, 0) and (dlogits[2] == 0).all()
    assert stats.logp[3] == -math.inf and stats.entropy[3].isfinite()
    assert dlogits[3].isfinite().all() and (dlogits[3, 1500:] == 0).all() and dlogits[3, 0] == 1
    assert dlogits[4].isfinite().all() and stats.logp[4].isfinite()


def test_offsets_beyond_int32(rows):
    """Two rows 2**31 elements apart, in an allocation of which only they are touched."""
    vocab, stride = 1003, 2**31 + 5
    storage = torch.empty(stride + vocab, dtype=BF16)
    far = storage.as_strided((2, vocab), (stride, 1))
    near, target = tile(2, vocab, BF16)
    far.copy_(near)
    one = torch.ones(2)
    results = []
    for logits in (near, far):
        apart = Tile(logits, target, Transform())
        stats = rows.stats(apart, extras=False)
        dlogits = rows.dlogits_(apart, stats, StatsGradients(one), BF16)
        results.append((stats.logp, stats.entropy, dlogits))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_same_bits_for_any_threads_and_batch(rows, dtypes):
    logits, target = tile(9, 40003, dtypes[0])
    grads = torch.randn(2, 9)

    def run(part: slice, threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        some = Tile(logits[part].clone(), target[part], Transform(temperature=0.8))
        stats = rows.stats(some, extras=True)
        dlogits = rows.dlogits_(some, stats, StatsGradients(*grads[:, part]), dtypes[1])
        return [*(x for x in stats if x is not None), dlogits]

    whole = run(slice(None), 1)
    for threads in (1, 2, 3):
        assert all(map(torch.equal, whole, run(slice(None), threads)))
    for row in range(9):
        alone = run(slice(row, row + 1), 2)
        assert all(torch.equal(a[row : row + 1], b) for a, b in zip(whole, alone, strict=True))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("outside", [-1, -(2**40), 1003, 2**40])
def test_target_outside_the_tile_takes_no_gradient(rows, outside, dtypes):
    logits, target = tile(4, 1003, dtypes[0])
    stats = rows.stats(Tile(logits, target, Transform()), extras=False)

    def dlogits_for(target: Tensor) -> Tensor:
        outer = StatsGradients(torch.ones(4), torch.ones(4))
        return rows.dlogits_(Tile(logits.clone(), target, Transform()), stats, outer, dtypes[1])

    whole = dlogits_for(target)
    dlogits = dlogits_for(torch.where(torch.arange(4) < 2, outside, target))
    assert torch.equal(dlogits[2:], whole[2:])
    off_target = torch.arange(1003) != target[:, None]
    assert torch.equal(dlogits[off_target], whole[off_target])
    p = stats.logp[:2].double().exp()
    expected = -p * (1 + stats.logp[:2] + stats.entropy[:2])
    at_target = dlogits[:2].gather(1, target[:2, None])[:, 0].double()
    torch.testing.assert_close(at_target, expected, rtol=1e-2, atol=1e-6)


def test_absence_is_announced_once(monkeypatch):
    monkeypatch.setattr(cpu, "_load", lambda: "it was not built")
    cpu.announce_absence.cache_clear()
    with pytest.warns(RuntimeWarning, match="it was not built.*C\\+\\+17"):
        cpu.announce_absence()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.announce_absence()
    cpu.announce_absence.cache_clear()
