"""The formulas of ``grpo-kernels plan``: allocations counted by hand and in the code they describe.

Real peaks are measured in ``benchmarks/test_plan.py``.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import predicted
from benchmarks.predicted import predicted_memory
from benchmarks.shapes import MODELS, Case
from benchmarks.work import WORKS
from grpo_kernels.backends.base import RowStats, Transform, output_view
from grpo_kernels.backends.cpu import rows as cpu
from grpo_kernels.backends.registry import chunk_rows
from grpo_kernels.engine import gradients as sums
from grpo_kernels.engine import sweep as schedule
from grpo_kernels.head import mkl
from grpo_kernels.head.head import Head
from grpo_kernels.schedule.schedules import _scaled_
from grpo_kernels.tools.estimate import (
    GPUS,
    IMPLEMENTATIONS,
    HeadShape,
    MemoryPrediction,
    Speed,
    datasheet,
    find_gpu,
    largest_micro_batch,
    measured,
    predict_head_memory,
    predict_head_work,
)

D, V = 64, 5000
CUDA = torch.device("cuda")


def predict(name: str, head: HeadShape, tokens: int, **options: Any) -> MemoryPrediction:
    prediction = predict_head_memory(name, head, tokens, **options)
    assert prediction is not None
    return prediction


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

    def stats(self, logits: Tensor, target: Tensor, transform: Transform, extras: bool) -> RowStats:
        return RowStats(*torch.empty((3, logits.shape[0]), device=logits.device).unbind(0))

    def dlogits_(self, logits, target, transform, stats, dlogp, dentropy, out_dtype) -> Tensor:
        return output_view(logits, out_dtype)


def one_pass_on_a_gpu(monkeypatch, head: HeadShape, tokens: int, precision: str) -> int:
    """Bytes at the peak of the schedule itself, on tensors without storage."""
    # on a GPU, a product writes its result and nothing else
    monkeypatch.setattr(schedule, "project", lambda rows, head, out: out)
    monkeypatch.setattr(sums, "accumulate", lambda *_, **__: None)
    hidden = torch.empty(tokens, D, dtype=head.dtype, device="meta")
    weight = torch.empty(V, D, dtype=head.weight_dtype or head.dtype, device="meta")
    target = torch.zeros(tokens, dtype=torch.int64, device="meta")
    chunks = schedule.row_chunks(tokens, chunk_rows(V, head.dtype, precision, CUDA, None))

    def middle(rows: slice, stats: RowStats) -> schedule.StatsGradients:
        return schedule.StatsGradients(stats.logp)

    with torch.no_grad(), LiveBytes(hidden, weight, target) as live:
        _, gradients = schedule.forward_backward(
            hidden,
            Head(weight, None, Transform()),
            target,
            schedule.Execution(EmptyRows(), chunks, precision),
            middle,
            schedule.Needs(hidden=True, weight=not head.frozen, bias=False),
        )
        dloss = torch.empty((), device="meta")
        pairs = zip(gradients[:2], (hidden, weight), strict=True)
        sampling_mask = [_scaled_(grad, dloss, x.dtype) for grad, x in pairs if grad is not None]
    assert len(sampling_mask) == 2 - head.frozen
    return live.growth


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mixed", (False, True))
@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("name,precision", [("ours", "fp32"), ("ours-input", "input")])
@pytest.mark.parametrize("chunks", (0.3, 2.4))
def test_gpu_formula_is_what_the_schedule_allocates(
    monkeypatch, dtype, mixed, frozen, name, precision, chunks
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
    tokens = int(chunks * chunk_rows(V, dtype, precision, CUDA, None))
    allocated = one_pass_on_a_gpu(monkeypatch, head, tokens, precision)
    # vectors of one value per token are left out
    assert predict(name, head, tokens).growth == pytest.approx(allocated, rel=0.01)


def test_eager_counted_by_hand():
    tokens, wide = 1000, 1000 * V * 4
    fp32 = predict("eager", HeadShape(hidden=D, vocabulary=V, dtype=torch.float32), tokens)
    assert fp32.inputs == fp32.returned == (tokens * D + V * D) * 4
    assert fp32.growth == 3 * wide  # the log-softmax, its gradient, the logits' gradient
    assert fp32.total == fp32.inputs + fp32.returned + fp32.extra
    bf16 = HeadShape(hidden=D, vocabulary=V)
    assert predict("eager", bf16, tokens).growth == 3 * wide
    assert predict("eager-entropy", bf16, tokens).growth == 3.5 * wide
    capped = HeadShape(hidden=D, vocabulary=V, softcap=True)
    assert predict("eager", capped, tokens).growth == 3.5 * wide
    # CUDA's fp16 kernel converts on its way; a CPU's does not
    fp16 = HeadShape(hidden=D, vocabulary=V, dtype=torch.float16)
    assert predict("eager", fp16, tokens).growth == 2.5 * wide
    assert predict("eager", fp16, tokens, device="cpu", threads=1).growth == 3 * wide


def test_trl_counted_by_hand():
    tokens, columns = 1000, 32768
    head = HeadShape(hidden=D, vocabulary=2 * columns)
    sums = (tokens + 2 * columns) * D * 4
    tile = tokens * columns * 2
    assert predict("trl", head, tokens).growth == sums + tile + sums // 2
    frozen = HeadShape(hidden=D, vocabulary=2 * columns, frozen=True)
    assert predict("trl", frozen, tokens).growth == tokens * D * 4 + tile + tokens * D * 2
    on_cpu = predict("trl", head, tokens, device="cpu", threads=1)
    assert on_cpu.growth == sums + tile + tokens * columns * (7 * 4 + 1)


def test_constants_of_trl():
    kernels = pytest.importorskip("trl.kernels.chunked_logprob")
    utils = pytest.importorskip("trl.trainer.utils")
    from grpo_kernels.tools.estimate import peers

    assert kernels.TOKEN_CHUNK_SIZE == peers._TRL_ROWS
    assert utils._CHUNKED_LOGPROB_CHUNK_SIZE == peers._TRL_COLUMNS


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_more_tokens_need_more(name, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for weight_dtype in (None, torch.float32):
            head = HeadShape(hidden=D, vocabulary=V, dtype=dtype, weight_dtype=weight_dtype)
            sizes = [
                predict(name, head, tokens, device=device).total
                for tokens in (1, 2, 7, 100, 4096, 100_000)  # chunks may shrink in between
            ]
            assert sizes == sorted(set(sizes))
            assert predict(name, head, 1, device=device).extra >= 0


def test_torch_row_passes_need_more(monkeypatch):
    head = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    native = predict("ours", head, 10_000, device="cpu").growth
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    assert predict("ours", head, 10_000, device="cpu").growth > native


def test_library_panels_only_where_threads_share_an_fp32_product():
    fp32 = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    sizes = {n: predict("eager", fp32, 10, device="cpu", threads=n).growth for n in (1, 2, 3)}
    assert sizes[1] <= sizes[2] == sizes[3]
    bf16 = HeadShape(hidden=D, vocabulary=V)
    one, two = (predict("eager", bf16, 10, device="cpu", threads=n) for n in (1, 2))
    assert one == two


def test_workspace_bounds_the_tile():
    head = HeadShape(hidden=D, vocabulary=V, dtype=torch.float32)
    small = predict("ours", head, 100_000, max_workspace_bytes=V * 4 * 10)
    assert small.extra == V * 4 * 10
    with pytest.raises(ValueError, match="max_workspace_bytes: expected at least 20000"):
        predict_head_memory("ours", head, 10, max_workspace_bytes=100)


def test_unknown_implementations_have_no_formula():
    head = HeadShape(hidden=D, vocabulary=V)
    assert predict_head_memory("liger", head, 10) is None
    assert predict_head_work("liger", head, 10) is None


def test_bad_numbers_are_named():
    head = HeadShape(hidden=D, vocabulary=V)
    with pytest.raises(ValueError, match="tokens: expected a number > 0, got 0"):
        predict_head_memory("ours", head, 0)
    with pytest.raises(ValueError, match="device: expected cpu or cuda; got 'tpu'"):
        predict_head_memory("ours", head, 1, device="tpu")
    with pytest.raises(ValueError, match="vocabulary: expected a number > 0, got -1"):
        HeadShape(hidden=D, vocabulary=-1)
    with pytest.raises(ValueError, match="dtype: expected one of torch.float32"):
        HeadShape(hidden=D, vocabulary=V, dtype=torch.float64)
    with pytest.raises(ValueError, match="weight_dtype: expected torch.float32 .*got torch.bf"):
        HeadShape(hidden=D, vocabulary=V, dtype=torch.float32, weight_dtype=torch.bfloat16)


@pytest.mark.parametrize("limit", (1, 2, 3, 1000, 1024, 123_457))
def test_largest_micro_batch(limit):
    assert largest_micro_batch(lambda tokens: tokens <= limit) == limit


def test_no_micro_batch_fits():
    assert largest_micro_batch(lambda tokens: False) == 0


def test_work_counts_products(monkeypatch):
    monkeypatch.setattr(cpu, "unavailable", lambda: None)
    head, product = HeadShape(hidden=D, vocabulary=V), 2.0 * 10 * D * V
    frozen = HeadShape(hidden=D, vocabulary=V, frozen=True)

    def products(name: str, shape: HeadShape, device: str = "cuda") -> tuple[float, ...]:
        """Plain, with fp32 sums, with statistics, in fp32."""
        work = predict_head_work(name, shape, 10, device=device)
        assert work is not None and work.traffic > 0
        kinds = (work.flop, work.sums_flop, work.fused_flop, work.wide_flop)
        return tuple(flop / product for flop in kinds)

    assert products("eager", head) == (3, 0, 0, 0) and products("trl", head) == (4, 0, 0, 0)
    assert products("ours", head) == (2, 1, 0, 0) and products("ours", frozen) == (1, 1, 0, 0)
    assert products("ours-input", head) == (3, 0, 0, 0)
    assert products("ours-two-pass", head) == (1, 2, 1, 0)
    # a CPU's own product gives the logits along with their statistics
    assert products("ours", head, "cpu") == (2, 0, 1, 0)
    assert products("ours-input", head, "cpu") == (3, 0, 0, 0)
    assert products("trl", head, "cpu") == (2, 0, 0, 2)
    # without it, and without a product that leaves its fp32 sums, 16 bits are multiplied in fp32
    monkeypatch.setattr(cpu, "unavailable", lambda: "it was not built")
    assert products("ours", head, "cpu")[2] == 0
    monkeypatch.setattr(mkl, "available", lambda dtype: False)
    assert products("ours", head, "cpu") == (2, 0, 0, 1)
    assert products("ours-two-pass", head, "cpu") == (1, 0, 0, 3)


def test_many_chunks_add_to_their_sums():
    def adding(head: HeadShape, rows: int, name: str = "ours") -> float:
        work = predict_head_work(name, head, 128, max_workspace_bytes=rows * V * 4)
        assert work is not None
        return work.adding

    bf16, size = HeadShape(hidden=D, vocabulary=V), V * D
    assert adding(bf16, 128) == 0  # one product, rounded once
    assert adding(bf16, 64) == size * (2 * 4 + 4 + 2)  # read and written once more, then rounded
    assert adding(bf16, 16) == size * (7 * 2 * 4 + 4 + 2)
    assert adding(HeadShape(hidden=D, vocabulary=V, dtype=torch.float32), 64) == size * 2 * 4
    assert adding(HeadShape(hidden=D, vocabulary=V, frozen=True), 16) == 0
    # a slice of dweight is one product over all rows; dhidden is summed over three of them
    assert 0 < adding(bf16, 128, "ours-two-pass") < 128 * D * 4 * 2 * 3


def test_time_is_products_and_passes():
    head = HeadShape(hidden=D, vocabulary=V)
    work = predict_head_work("trl", head, 10, device="cpu")
    speed = Speed(matrix=2e9, wide_matrix=1e9, bandwidth=1e8, where="", source="")
    expected = work.flop / 2e9 + work.wide_flop / 1e9 + work.traffic / 1e8
    assert work.seconds(speed) == expected


@pytest.mark.parametrize(
    "driver,name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 40GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_data_sheets(driver, name):
    gpu = find_gpu(driver)
    assert gpu is not None and gpu.name == name
    speed = datasheet(gpu, torch.bfloat16)
    assert name in speed.source and speed.matrix < gpu.tflops * 1e12
    assert datasheet(gpu, torch.float32).matrix < speed.matrix


def test_every_data_sheet_is_found_by_its_name():
    assert [find_gpu(gpu.name) for gpu in GPUS] == list(GPUS)
    assert find_gpu("NVIDIA GeForce GTX 970") is None


def test_measured_speed(monkeypatch):
    monkeypatch.setattr("grpo_kernels.tools.estimate.speed._SECONDS", 0.0)
    speed = measured(torch.device("cpu"), torch.bfloat16, D)
    assert min(speed.matrix, speed.wide_matrix, speed.bandwidth) > 0


def test_cases_of_the_benchmarks(monkeypatch):
    def of(work: str, provider: str, tokens: int = 1024) -> MemoryPrediction | None:
        case = Case(MODELS["qwen2.5-0.5b"], tokens, "fp32", WORKS[work])
        return predicted_memory(case, provider, "cpu")

    def auto_takes(schedule: str) -> None:
        rate = 1e12 if schedule == "one_pass" else 1e30  # a fourth product costs nothing
        speed = Speed(matrix=1e12, fused=rate, adding=1e12, wide_matrix=1e12, bandwidth=1e12,
                      where="a test", source="a test")  # fmt: skip
        monkeypatch.setattr(predicted, "speed_of", lambda *_: speed)

    head = HeadShape(hidden=896, vocabulary=151936, dtype=torch.float32)
    ours = predict("ours", head, 1024, device="cpu")
    auto_takes("one_pass")
    assert of("dapo", "ours") == of("nll", "ours") == ours
    assert of("gspo", "ours", 512) == of("dapo", "ours", 512)
    assert of("dapo-frozen", "ours").returned < ours.returned
    # a sequence of 1024 tokens does not fit into the tile
    two_pass = predict("ours-two-pass", head, 4096, device="cpu")
    assert of("gspo", "ours", 4096) == two_pass
    assert of("dapo-masked", "ours") is of("logprobs", "ours") is of("dapo", "liger") is None
    auto_takes("two_pass")
    assert of("dapo", "ours") == of("dapo", "ours-two-pass") != ours
