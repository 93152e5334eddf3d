"""What only the native forward has: tiles along with their statistics, its bounds, its threads."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from grpo_kernels.backends import Backend, RowStats, StatsGradients, Wanted
from grpo_kernels.backends.cpu.linear import NativeHeadRows, NativeLinear
from grpo_kernels.backends.registry import BACKENDS
from grpo_kernels.engine import GradientSums, Needs, Route, Rows, RunOptions, sweep
from grpo_kernels.head import Transform
from tests.backends.conftest import CPU, LinearTarget
from tests.backends.test_linear import check
from tests.support.linear_problems import (
    BF16,
    DTYPES,
    FP32,
    ISAS,
    logits_of,
    problem,
    same,
    statistics,
)


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> NativeLinear:
    return NativeLinear(ISAS.index(request.param))


@pytest.mark.parametrize("shape", [(511, 40, 300), (513, 40, 300), (770, 40, 300), (3, 1111, 200)])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_several_chunks_and_a_depth_beyond_one_block(native, shape, dtype):
    check(LinearTarget(native, CPU), *problem(*shape, dtype))


def test_row_vectors_with_strides(native):
    """The kernel reads contiguous copies, which must live as long as the call."""
    hidden, head, target = problem(8, 33, 1100, torch.float32)
    temperature = 0.5 + torch.rand(8)
    rows = replace(head, transform=Transform(temperature=temperature))
    expected = native(hidden, rows, target, "fp32", extras=True)
    target, temperature = (torch.stack([x, x], -1)[:, 0] for x in (target, temperature))
    rows = replace(head, transform=Transform(temperature=temperature))
    assert same(expected, native(hidden, rows, target, "fp32", extras=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_along_with_their_statistics(native, dtype):
    hidden, head, target = problem(21, 70, 1300, dtype)
    head = replace(head, transform=Transform(softcap=4.0, temperature=0.7))
    storage = torch.full((21, 1303), math.nan)
    logits = storage[:, :1300]
    stats = native(hidden, head, target, "fp32", True, logits)
    assert same(stats, native(hidden, head, target, "fp32", extras=True))
    assert storage[:, 1300:].isnan().all()
    exact = logits_of(hidden, head, "fp32", torch.float64)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


class _OneIsa(Backend):
    """The native kernels in one instruction set."""

    has_tiles = True

    def __init__(self, rank: int) -> None:
        self._rank = rank

    @property
    def kernels(self) -> NativeHeadRows:
        return NativeHeadRows(self._rank)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_training_has_the_statistics_of_the_forward(native, dtype, batch_invariant):
    hidden, head, target = problem(21, 70, 1300, dtype)
    route = Route(
        backend=_OneIsa(native._isa_rank),
        options=RunOptions(batch_invariant=batch_invariant),
        dtype=dtype,
        device=hidden.device,
        columns=1300,
        tile_rows=16,
        linear_stats=None,
    )

    def stage(part: slice, stats: RowStats) -> StatsGradients:
        return StatsGradients(dlogp=torch.ones_like(stats.logp))

    rows = Rows(hidden=hidden, head=head, target=target)
    chunks = [slice(0, 16), slice(16, 21)]
    sums = GradientSums(rows, Needs(hidden=True, weight=True, bias=True), len(chunks))
    stats, gradients = sweep(rows, route, chunks, Wanted(extras=True), stage, sums)
    assert same(stats, native(hidden, head, target, "fp32", extras=True))
    inputs = [x.double().requires_grad_() for x in (hidden, head.weight, head.bias)]
    logits = inputs[0] @ inputs[1].t() + inputs[2]
    exact = torch.autograd.grad(statistics(logits, target, Transform()).logp.sum(), inputs)
    for actual, expected in zip(gradients[:3], exact, strict=True):
        error = (actual.double() - expected).norm() / expected.norm()
        assert error < 0.01, error


_GUARDED = """
import ctypes, itertools, mmap, sys, torch
from grpo_kernels.backends.cpu.linear import NativeLinear
from grpo_kernels.head import Head, HeadLoRA, Transform

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

def at_the_end(x):  # of a mapping, before a page that cannot be read
    pages = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, pages + mmap.PAGESIZE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert libc.mprotect(whole.data_ptr() + pages, mmap.PAGESIZE, 0) == 0
    return whole[pages - x.nbytes : pages].view(x.dtype).view(x.shape).copy_(x)

dtypes = (torch.float32, torch.bfloat16, torch.float16)
for rank, dtype in itertools.product(range(int(sys.argv[1])), dtypes):
    linear = NativeLinear(rank)
    for tokens, depth, columns in ((1, 1, 1), (3, 33, 17), (17, 100, 1025), (50, 257, 130)):
        hidden, weight = (at_the_end(torch.randn(n, depth).to(dtype)) for n in (tokens, columns))
        target = at_the_end(torch.randint(columns, (tokens,)))
        bias = at_the_end(torch.randn(columns).to(dtype))
        logits = at_the_end(torch.empty(tokens, columns))
        linear(hidden, Head(weight, bias, Transform()), target, "fp32", True, logits)
        lora = HeadLoRA(a=torch.randn(8, depth), b=at_the_end(torch.randn(columns, 8)))
        linear(hidden, Head(weight, bias, Transform(), lora), target, "fp32", True, logits)
print("inside")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="page protection")
def test_touches_nothing_beyond_its_arguments():
    done = subprocess.run(
        [sys.executable, "-c", _GUARDED, str(len(ISAS))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "inside", done.stderr


_CRAMPED = """
import mmap, resource, torch
from grpo_kernels.backends.cpu.linear import NATIVE_LINEAR
from grpo_kernels.head import Head, Transform

hidden, head = torch.randn(64, 64), Head(torch.randn(5000, 64), None, Transform())
target = torch.arange(64)
expected = NATIVE_LINEAR(hidden, head, target, "fp32", False)
torch.set_num_threads(64)
with open("/proc/self/statm") as file:
    size = int(file.read().split()[0]) * mmap.PAGESIZE
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20),) * 2)
found = NATIVE_LINEAR(hidden, head, target, "fp32", False)
print(torch.equal(found.logp, expected.logp))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits")
@pytest.mark.skipif(not ISAS, reason="no native kernels")
def test_works_where_no_thread_can_be_started():
    """There is no room for the stacks of all 64."""
    done = subprocess.run(
        [sys.executable, "-c", _CRAMPED], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr


def test_registered():
    hidden, head, _ = problem(2, 4, 5, FP32)
    assert BACKENDS["cpu"].linear_stats(hidden.dtype, head, "input") is not None
    assert BACKENDS["chunked"].linear_stats(hidden.dtype, head, "fp32") is None
