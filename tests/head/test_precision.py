"""Precision is the argument's: torch's global switches change neither results nor themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends, linear_logprobs
from grpo_kernels.head import matmul_precision
from grpo_kernels.head.matmul import tf32_unavailable
from grpo_kernels.testing import Problem, make_problem, relative_error

BACKENDS = list(available_backends())
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MKLDNN, CUBLAS = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul


SWITCHES: dict[str, Callable[[], None]] = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "per backend": lambda: (_set(MKLDNN, "bf16"), _set(CUBLAS, "tf32")),
    "for all": lambda: _set(torch.backends, "tf32"),
}


def _set(switch: object, precision: str) -> None:
    switch.fp32_precision = precision  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    MKLDNN.fp32_precision = CUBLAS.fp32_precision = "none"


def run(problem: Problem, backend: str) -> dict[str, Tensor]:
    out = linear_logprobs(
        problem.hidden, problem.weight, problem.target, outputs=("logprobs", "entropy"),
        backend=backend,
    )  # fmt: skip
    results = {"logprobs": out.logprobs, "entropy": out.entropy}
    if backend == "reference":  # its backward is torch's own
        return results
    inputs = (problem.hidden, problem.weight)
    gradients = torch.autograd.grad((out.logprobs * out.entropy).sum(), inputs)
    return {**results, "dhidden": gradients[0], "dweight": gradients[1]}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_bits_do_not_depend_on_global_switches(
    backend: str, switch: str, dtype: torch.dtype
) -> None:
    problem = make_problem(2, 9, hidden_size=64, vocab_size=80, values_in=torch.float32)
    problem = problem.to("cpu", dtype)
    expected = run(problem, backend)
    SWITCHES[switch]()
    before = (MKLDNN.fp32_precision, CUBLAS.fp32_precision)
    got = run(problem, backend)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert (MKLDNN.fp32_precision, CUBLAS.fp32_precision) == before


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("device", (CPU, CUDA))
def test_switches_are_restored(switch: str, device: torch.device) -> None:
    SWITCHES[switch]()

    def state() -> tuple[object, ...]:
        of_gpu = (
            CUBLAS.allow_fp16_accumulation,
            CUBLAS.allow_bf16_reduced_precision_reduction,
            CUBLAS.allow_fp16_reduced_precision_reduction,
        )
        places = (torch.backends, MKLDNN, CUBLAS)
        return (*of_gpu, *(place.fp32_precision for place in places))

    before = state()
    with pytest.raises(KeyError), matmul_precision(device, "fp32"):
        raise KeyError
    assert state() == before
    if switch == "medium":  # the older functions still answer
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_tf32


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name not in ("cpu", "reference")])
def test_tf32_on_a_gpu(backend: str) -> None:
    if tf32_unavailable(CUDA, torch.float32) is not None:
        pytest.skip("this GPU has no tf32")
    problem = make_problem(4, 16, hidden_size=256, vocab_size=500, values_in=torch.float32)
    exact = linear_logprobs(problem.hidden, problem.weight, problem.target).logprobs
    posed = problem.to("cuda", torch.float32)
    args = (posed.hidden, posed.weight, posed.target)
    errors = {
        precision: relative_error(
            linear_logprobs(*args, precision=precision, backend=backend).logprobs, exact
        )
        for precision in ("fp32", "tf32")
    }
    assert errors["fp32"] < 2e-6 < errors["tf32"] < 5e-3
