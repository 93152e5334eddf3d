"""Out of memory at any allocation: met once by smaller chunks, with the result of an easy run."""

from __future__ import annotations

import importlib
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.engine import gradients
from grpo_kernels.head import Head
from grpo_kernels.testing import Problem, make_problem, run

T, D, V = 48, 16, 300
TILE = 16 * V * 4  # rows of fp32 logits
ERRORS = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 12 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cublas": RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
}


class Shortage:
    """Lets the n-th GEMM of logits fail, and those after it up to the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.failing, self.error = 0, range(0), ERRORS["cuda"]
        self.failed: Callable[[], Tensor | None] = lambda: None
        for module in (importlib.import_module("grpo_kernels.engine.chunked_loop"), gradients):
            monkeypatch.setattr(module, "project", self._wrapped(module.project))

    def at(self, first: int, last: int | None = None, error: str = "cuda") -> None:
        self.count, self.error = 0, ERRORS[error]
        self.failing = range(first, (first if last is None else last) + 1)

    def _wrapped(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def project(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
            self.count += 1
            assert self.failed() is None, "a try that failed keeps its memory"
            if self.count in self.failing:
                self.failed = weakref.ref(out)
                raise type(self.error)(*self.error.args)  # another one, without a traceback
            return run(hidden, head, out)

        return project


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    return Shortage(monkeypatch)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Problem, TokenBatch]:
    """Return a problem whose tokens are all valid; those of one sequence have no advantage."""
    problem = make_problem(4, T // 4, D, V, seed=3).to("cpu", dtype)
    advantages = torch.tensor([1.0, -1.0, 0.0, 2.0])
    changes = dict(advantages=advantages, mask=None, ref_logprobs=None, rollout_logprobs=None)
    return problem, problem.batch(**changes)


def loss_of(name: str = "dapo", dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    """Return loss, gradients and the mean entropy."""
    problem, batch = inputs(dtype)
    options = dict(backend="chunked", max_workspace_bytes=TILE) | options
    got = run(problem, LossConfig(loss_type=name), batch, **options)
    return [got[x] for x in ("loss", "dhidden", "dweight", "dbias", "entropy")]


def assert_same(found: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for one, two in zip(found, want, strict=True):
        assert (one - two).float().norm() <= bound * two.float().norm()


@pytest.mark.parametrize("name", ("dapo", "gspo"))
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("at,dtype", [(1, torch.float32), (2, torch.bfloat16)])
def test_one_pass_goes_on_in_smaller_chunks(
    shortage: Shortage, name: str, error: str, at: int, dtype: torch.dtype
) -> None:
    want = loss_of(name, dtype, schedule="one_pass")
    shortage.at(at, error=error)
    with pytest.warns(RuntimeWarning, match="out of memory: .*max_workspace_bytes="):
        found = loss_of(name, dtype, schedule="auto" if name == "gspo" else "one_pass")
    assert_same(found, want, dtype)


def test_then_two_pass(shortage: Shortage) -> None:
    want = loss_of(schedule="one_pass")
    shortage.at(2, last=3)  # the second chunk, and the first of the smaller ones
    with pytest.warns(RuntimeWarning, match=r"attempt 3.*schedule='two_pass'.*=4800"):
        found = loss_of()
    assert_same(found, want, torch.float32)


@pytest.mark.parametrize("options", ({}, {"schedule": "one_pass"}, {"schedule": "two_pass"}))
def test_each_way_is_tried_once(shortage: Shortage, options: dict[str, str]) -> None:
    shortage.at(1, last=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            loss_of(**options)
    assert shortage.count <= 4


@pytest.mark.parametrize("schedule_name", ("one_pass", "two_pass"))
def test_an_offered_buffer_is_never_added_to_twice(shortage: Shortage, schedule_name: str) -> None:
    problem, batch = inputs()

    def summed() -> Tensor:
        buffer = torch.zeros_like(problem.weight)
        run(
            problem, LossConfig(), batch, backend="chunked", schedule=schedule_name,
            max_workspace_bytes=TILE, main_grad=buffer,
        )  # fmt: skip
        return buffer

    want = summed()
    if schedule_name == "two_pass":
        shortage.at(5)  # behind the forward's three tiles
        with pytest.raises(torch.OutOfMemoryError, match="main_grad now holds a part"):
            summed()
    # before anything was added, there is a second try
    shortage.at(2)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert_same([summed()], [want], torch.float32)


def test_a_fixed_tile_is_not_made_smaller(shortage: Shortage) -> None:
    """It decides the bits that were promised; two_pass has the same."""
    options = dict(batch_invariant=True, max_workspace_bytes=16 * V * 4)
    want = loss_of(**options)
    shortage.at(2)
    with pytest.warns(RuntimeWarning, match="schedule='two_pass', max_workspace_bytes=19200"):
        assert_same(loss_of(**options), want, torch.float32)


@pytest.mark.parametrize("at", (1, 3, 4, 5))
def test_two_pass_in_forward_and_backward(shortage: Shortage, at: int) -> None:
    want = loss_of(schedule="two_pass")
    shortage.at(0)
    loss_of(schedule="two_pass")
    assert shortage.count == 6  # three tiles in each direction
    shortage.at(at)
    with pytest.warns(RuntimeWarning, match="attempt 2.*max_workspace_bytes=4800"):
        found = loss_of(schedule="two_pass")
    assert_same(found, want, torch.float32)
