"""The formulas of ``grpo-kernels plan``: allocations counted by hand and in the code they describe.

Real peaks are measured in ``benchmarks/test_plan.py``.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_kernels import LossConfig, TokenBatch, explain
from grpo_kernels.backends import Backend, RowStats, StatsGradients, Tile, chunk_rows
from grpo_kernels.backends.base import output_view
from grpo_kernels.engine import (
    Bounded,
    GradientSums,
    Keeping,
    Needs,
    Route,
    Rows,
    RunOptions,
    kept_gradients,
    row_chunks,
    rows_backward,
    rows_forward,
    sweep,
)
from grpo_kernels.head import Head, Transform, logits_dtype
from grpo_kernels.schedule import summing_rows
from grpo_kernels.tools.estimate import (
    HeadShape,
    default_schedule,
    estimate_memory,
    memory,
    read_shard,
)

D, V = 64, 5000
NAMES = ("eager", "trl", "one_pass", "two_pass")
CUDA = torch.device("cuda")


class LiveBytes(TorchDispatchMode):
    """The peak of the bytes in storages that operations return."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self.now = self.peak = 0
        for x in inputs:
            self._add(x)
        self._inputs = self.now

    @property
    def growth(self) -> int:
        return self.peak - self._inputs

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return out

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, size = id(storage), storage.nbytes()
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def forget(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, forget)
        self.now += size
        self.peak = max(self.peak, self.now)


class EmptyRows:
    """Row kernels that allocate what Triton's do."""

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        rows = tile.logits.shape[0]
        return RowStats(*torch.empty((3, rows), device=tile.logits.device).unbind(0))

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGradients,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return output_view(tile.logits, out_dtype) if out is None else out


class OnAGpu(Backend):
    name, has_tiles, kernels = "a GPU's", True, EmptyRows()


def one_tile(name: str, head: HeadShape, precision: str) -> int:
    """Return the rows of a tile of a schedule on a GPU."""
    rows = chunk_rows(V, head.dtype, precision, CUDA, None)
    if name == "two_pass" or head.frozen:
        return rows
    return summing_rows("cuda", rows, D, head.dtype, logits_dtype(head.dtype, precision))


def allocated(
    monkeypatch, name: str, head: HeadShape, tokens: int, precision: str, kept: int | None
) -> int:
    """Return the peak bytes of the schedule's gradients, on tensors without storage."""
    # on a GPU, a GEMM writes its result and nothing else
    for module in ("sweep", "recompute"):
        place = sys.modules[f"grpo_kernels.engine.{module}"]
        monkeypatch.setattr(place, "project", lambda rows, head, out: out)
    for module in ("gradients", "recompute"):
        place = sys.modules[f"grpo_kernels.engine.{module}"]
        monkeypatch.setattr(place, "accumulate", lambda *_, **__: None)
    hidden = torch.empty(tokens, D, dtype=head.dtype, device="meta")
    weight = torch.empty(V, D, dtype=head.weight_dtype or head.dtype, device="meta")
    target = torch.zeros(tokens, dtype=torch.int64, device="meta")
    rows = Rows(hidden=hidden, head=Head(weight, None, Transform()), target=target)
    route = Route(
        backend=OnAGpu(),
        options=RunOptions(precision=precision, activation_bytes=kept),
        dtype=head.dtype,
        device=hidden.device,
        columns=V,
        tile_rows=one_tile(name, head, precision),
        linear_stats=None,
    )
    needs = Needs(hidden=True, weight=not head.frozen)
    keeping = Keeping.of(tokens, D, route, needs)
    with torch.no_grad(), LiveBytes(hidden, weight, target) as live:
        if name == "one_pass":
            stage = lambda part, stats: StatsGradients(stats.logp)  # noqa: E731
            chunks = row_chunks(tokens, route)
            sums = GradientSums(rows, needs, len(chunks))
            gradients = sweep(rows, route, chunks, stage=stage, sums=sums)[1]
        elif keeping.what != "nothing":
            stats, saved = rows_forward(rows, route, keeping=keeping)
            gradients = kept_gradients(
                keeping.what, saved, rows, stats, torch.empty_like(stats.logp), route, needs
            )
        else:
            if head.dtype == torch.float32:  # a 16-bit forward has no tile
                sweep(rows, route, row_chunks(tokens, route))
            stats = RowStats(*torch.empty((3, tokens), device="meta").unbind(0))
            gradients = rows_backward(rows, stats, StatsGradients(stats.logp), route, needs)
        scale = torch.empty((), device="meta")
        pairs = zip(gradients[:2], (hidden, weight), strict=True)
        results = [grad.mul_(scale).to(x.dtype) for grad, x in pairs if grad is not None]
    assert len(results) == 2 - head.frozen
    return live.growth


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mixed", (False, True))
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize(
    "name,precision,kept",
    [
        ("one_pass", "fp32", None),
        ("one_pass", "input", None),
        ("two_pass", "fp32", 0),
        ("two_pass", "fp32", None),
        ("two_pass", "fp32", 1 << 30),
        ("two_pass", "input", 1 << 30),
    ],
)
@pytest.mark.parametrize("chunks", (0.3, 2.4))
def test_gpu_formula_is_what_the_schedule_allocates(
    monkeypatch, dtype, mixed, frozen, name, precision, kept, chunks
):
    if mixed and dtype == torch.float32:
        pytest.skip("nothing is mixed")
    head = HeadShape(
        hidden=D,
        vocabulary=V,
        dtype=dtype,
        weight_dtype=torch.float32 if mixed else None,
        frozen=frozen,
    )
    tokens = int(chunks * one_tile(name, head, precision))
    counted = allocated(monkeypatch, name, head, tokens, precision, kept)
    # vectors of one value per token are left out
    estimate = estimate_memory(name, head, tokens, precision=precision, activation_bytes=kept)
    assert estimate.growth == pytest.approx(counted, rel=0.01)


def growth(name: str, head: HeadShape, tokens: int, **options: Any) -> int:
    return estimate_memory(name, head, tokens, **options).growth


@pytest.fixture
def one_thread(monkeypatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


@pytest.mark.usefixtures("one_thread")
def test_eager_counted_by_hand():
    tokens, wide = 1000, 1000 * V * 4
    fp32 = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    estimate = estimate_memory("eager", fp32, tokens)
    assert estimate.inputs == estimate.returned == (tokens * D + V * D) * 4
    assert estimate.growth == 3 * wide  # the log-softmax, its gradient, the logits' gradient
    assert estimate.total == estimate.inputs + estimate.returned + estimate.extra
    assert growth("eager", HeadShape(hidden=D, vocabulary=V), tokens) == 3 * wide
    softcapped = HeadShape(hidden=D, vocabulary=V, softcap=True)
    assert growth("eager", softcapped, tokens) == 3.5 * wide
    # CUDA's fp16 kernel converts on its way; a CPU's does not
    fp16 = HeadShape(hidden=D, vocabulary=V, dtype=torch.float16)
    assert growth("eager", fp16, tokens) == 2.5 * wide
    assert growth("eager", fp16, tokens, device="cpu") == 3 * wide


@pytest.mark.usefixtures("one_thread")
def test_trl_counted_by_hand():
    tokens, columns = 1000, 32768
    head = HeadShape(hidden=D, vocabulary=2 * columns)
    sums = (tokens + 2 * columns) * D * 4
    tile = tokens * columns * 2
    assert growth("trl", head, tokens) == sums + tile + sums // 2
    frozen = HeadShape(hidden=D, vocabulary=2 * columns, frozen=True)
    assert growth("trl", frozen, tokens) == tokens * D * 4 + tile + tokens * D * 2
    on_cpu = growth("trl", head, tokens, device="cpu")
    assert on_cpu == sums + tile + tokens * columns * (7 * 4 + 1)


def test_entries_counted_by_hand():
    """Twice those of all rows: of the chunks, and joined; whatever the schedule."""
    tokens, slots = 1000, 100
    entries = tokens * (2 * slots + 5) * 4
    for dtype, width in ((torch.float32, 4), (torch.bfloat16, 2)):
        head = HeadShape(hidden=D, vocabulary=V, dtype=dtype)
        gradients, tile = (tokens + V) * D * width, 1024 * 5024 * 4
        one, two = (
            growth(name, head, tokens, bounded=Bounded(slots=slots, exact_weight=False))
            for name in ("one_pass", "two_pass")
        )
        assert one == gradients + tile + 2 * entries
        assert two == max(entries + tile, gradients + 2 * entries)
    # of bf16 once more, with an exact gradient of the weight; two passes form slices again
    one, two = (
        growth(name, head, tokens, bounded=Bounded(slots=slots))
        for name in ("one_pass", "two_pass")
    )
    assert one == gradients + tile + 2 * entries
    assert two == max(entries + tile, gradients + 2 * entries + 1000 * V * 4)
    few = HeadShape(hidden=D, vocabulary=50)  # no row has more entries than ids
    sparse = Bounded(exact_weight=False)
    assert growth("two_pass", few, tokens, bounded=sparse) == 2 * tokens * 105 * 4 + (
        (tokens + 50) * D * 2
    )


def test_shards_counted_by_hand():
    tokens, ranks = 1000, 8
    whole = HeadShape(hidden=D, vocabulary=V + 3, dtype=torch.bfloat16, weight_dtype=torch.float32)
    weight, rows = (V + 3) * D * 4, -(-(V + 3) // ranks)
    alone = estimate_memory("two_pass", whole, tokens)
    for how, size in (("fsdp", rows * D * 4), ("zero3", -(-(V + 3) * D // ranks) * 4)):
        shard = read_shard(f"{how}={ranks}")
        assert shard.head(whole) is whole
        found = shard.add(alone, whole)
        assert found.shards == 2 * size
        assert found.extra == max(alone.extra, weight)
        assert found.total == alone.inputs + alone.returned + found.extra + found.shards
        assert list(shard.sent(whole, tokens).values()) == [2 * weight * 7 // 8, weight * 7 // 8]
        frozen = replace(whole, frozen=True)
        assert shard.add(alone, frozen).shards == size
        assert list(shard.sent(frozen, tokens).values()) == [2 * weight * 7 // 8]
    no_buffer = replace(alone, extra=0)
    assert read_shard("fsdp=8").add(no_buffer, frozen).extra == weight
    assert read_shard("zero3=8").add(no_buffer, frozen).extra == 0


def test_a_part_of_the_vocabulary_counted_by_hand():
    """The gradient of the hidden states is summed over the ranks in fp32, and rounded then."""
    tokens, whole, shard = 1000, HeadShape(hidden=D, vocabulary=V + 3), read_shard("tp=8")
    head = shard.head(whole)
    assert head == replace(whole, vocabulary=626)
    tile, wide, dweight = 1024 * 640 * 4, tokens * D * 4, 626 * D * 2
    assert growth("one_pass", head, tokens, sums_dhidden=True) == wide + dweight + tile
    frozen = replace(head, frozen=True)
    assert growth("two_pass", frozen, tokens, sums_dhidden=True) == wide + tile
    sent = shard.sent(whole, tokens)
    assert list(sent.values()) == [tokens * 32 * 7, 2 * (wide * 7 // 8)]


def test_constants_of_trl():
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    utils = pytest.importorskip("trl.trainer.utils")
    assert kernels.TOKEN_CHUNK_SIZE == memory._TRL_ROWS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == memory._TRL_COLUMNS


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_more_tokens_need_more(name, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for weight_dtype in (None, torch.float32):
            head = HeadShape(hidden=D, vocabulary=V, dtype=dtype, weight_dtype=weight_dtype)
            sizes = [
                estimate_memory(name, head, tokens, device=device).total
                for tokens in (1, 2, 7, 100, 4096, 100_000)  # chunks may shrink in between
            ]
            assert sizes == sorted(set(sizes))
            assert estimate_memory(name, head, 1, device=device).extra >= 0


def test_library_panels_only_where_threads_share_an_fp32_gemm(monkeypatch):
    def on_threads(threads: int, head: HeadShape) -> int:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        return growth("eager", head, 10, device="cpu")

    fp32 = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    assert on_threads(1, fp32) <= on_threads(2, fp32) == on_threads(3, fp32)
    bf16 = HeadShape(hidden=D, vocabulary=V)
    assert on_threads(1, bf16) == on_threads(2, bf16)


def test_workspace_bounds_the_tile():
    head = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    small = estimate_memory("one_pass", head, 100_000, max_workspace_bytes=V * 4 * 10)
    assert small.extra == 20096 * 10  # a row ends at a multiple of 128 bytes
    with pytest.raises(ValueError, match="max_workspace_bytes: expected at least 20000"):
        estimate_memory("one_pass", head, 10, max_workspace_bytes=100)


# hidden size and vocabulary of Qwen 2.5 0.5B, Qwen 3 1.7B and 8B, Llama 3.2 1B and 8B, Gemma 3 4B
HEADS = [(896, 151936), (2048, 151936), (4096, 151936), (2048, 128256), (4096, 128256)]
HEADS += [(2560, 262144)]


@pytest.mark.parametrize("hidden,vocabulary", HEADS)
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_the_default_takes_less_memory_than_a_chunked_head(device, hidden, vocabulary):
    for dtype, frozen in product((torch.float32, torch.bfloat16, torch.float16), (False, True)):
        head = HeadShape(hidden=hidden, vocabulary=vocabulary, dtype=dtype, frozen=frozen)
        for tokens in (4096, 5000, 8192, 16384, 1 << 20):
            ours = growth(
                default_schedule(head, tokens, device=device), head, tokens, device=device
            )
            assert ours < growth("trl", head, tokens, device=device)


def test_the_tile_of_one_pass_is_what_a_plan_takes():
    hidden = torch.zeros(1, 1000, 1024, dtype=torch.bfloat16, requires_grad=True)
    batch = TokenBatch.from_padded(torch.zeros(1, 1000, dtype=torch.int64), torch.ones(1))
    for trained, rows, schedule in ((True, 1000, "one_pass"), (False, 512, "one_pass")):
        weight = torch.zeros(65536, 1024, dtype=torch.bfloat16, requires_grad=trained)
        plan = explain(hidden, weight, batch, LossConfig(loss_type="dapo"))
        assert (plan.tile_rows, plan.schedule) == (rows, schedule)
        plan = explain(hidden, weight, batch, LossConfig(), max_workspace_bytes=640 * 65536 * 4)
        assert plan.tile_rows <= 640


def test_the_default_is_what_a_plan_takes():
    seen, columns = set(), 8 * V
    for tokens, frozen in product((64, 4096), (False, True)):
        target = torch.zeros(1, tokens, dtype=torch.int64)
        batch = TokenBatch.from_padded(target, torch.ones(1))
        for dtype in (torch.float32, torch.bfloat16):
            head = HeadShape(hidden=2, vocabulary=columns, dtype=dtype, frozen=frozen)
            hidden = torch.zeros(1, tokens, 2, dtype=dtype, requires_grad=True)
            weight = torch.zeros(columns, 2, dtype=dtype, requires_grad=not frozen)
            plan = explain(hidden, weight, batch, LossConfig(loss_type="dapo"))
            assert default_schedule(head, tokens, device="cpu") == plan.schedule
            seen.add(plan.schedule)
    assert seen == {"one_pass", "two_pass"}


BF16_HEAD = {"dtype": torch.float32, "weight_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (estimate_memory, {"name": "liger"}, "name: expected one of eager, .*; got 'liger'"),
        (estimate_memory, {"tokens": 0}, "tokens: expected a number > 0, got 0"),
        (estimate_memory, {"device": "tpu"}, "device: expected cpu or cuda; got 'tpu'"),
        (HeadShape, {"vocabulary": -1}, "vocabulary: expected a number > 0, got -1"),
        (HeadShape, {"dtype": torch.float64}, "dtype: expected one of torch.float32"),
        (HeadShape, BF16_HEAD, "weight_dtype: expected torch.float32 .*got torch.bf"),
    ],
)
def test_bad_numbers_are_named(make, changes, message):
    sizes = {"hidden": D, "vocabulary": V}
    one_pass = {"name": "one_pass", "head": HeadShape(**sizes), "tokens": 10}
    with pytest.raises(ValueError, match=message):
        make(**(sizes if make is HeadShape else one_pass) | changes)
