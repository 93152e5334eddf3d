"""LoRA on the head: the native kernel, the torch.library op, memory, explanations and bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA, available_backends, explain_logprobs, linear_logprobs
from grpo_kernels.backends.cpu.linear import NativeLinear
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import relative_error
from tests.support.linear_problems import DTYPES, ISAS, problem, same, statistics
from tests.support.lora_problems import largest_allocation, lora_problem
from tests.support.op_checks import check_backward, check_forward

BACKENDS = [name for name in available_backends() if name not in ("reference", "triton")]
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}


@pytest.mark.parametrize("isa", range(len(ISAS)), ids=ISAS)
@pytest.mark.parametrize("precision", ("fp32", "input"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_update(isa: int, precision: str, dtype: torch.dtype) -> None:
    """Every instruction set, several chunks of tokens and blocks of the vocabulary."""
    for tokens, depth, columns, rank in ((1, 3, 1, 1), (17, 33, 131, 8), (531, 20, 1027, 19)):
        hidden, head, target = problem(tokens, depth, columns, dtype)
        lora = HeadLoRA(a=torch.randn(rank, depth), b=torch.randn(columns, rank), scaling=0.3)
        tile = torch.full((tokens, columns), float("nan"))
        linear, adapted = NativeLinear(isa), replace(head, lora=lora)
        stats = linear(hidden, adapted, target, precision, extras=True, logits=tile)
        assert same(stats, linear(hidden, adapted, target, precision, extras=True))
        wide = hidden.double(), head.weight.double(), lora.a.double(), lora.b.double()
        exact = wide[0] @ wide[1].t() + 0.3 * (wide[0] @ wide[2].t()) @ wide[3].t()
        if precision == "input":
            exact = exact.to(dtype) + head.bias
        else:
            exact = exact + head.bias.double()
        assert relative_error(tile, exact) < (1e-6 if precision == "fp32" else ROUNDING[dtype])
        expected = statistics(tile.double(), target, Transform())
        for name in ("logp", "entropy", "lse"):
            assert relative_error(getattr(stats, name), getattr(expected, name)) < 1e-5


@pytest.mark.parametrize("scaling", (1.0, -0.5))
def test_joined_adapters_are_their_sum(scaling: float) -> None:
    first = lora_problem(rank=2).lora
    second = replace(lora_problem(rank=5).lora, scaling=scaling)
    joined = HeadLoRA.joined([first, second])
    assert joined is not None and joined.rank == 7
    torch.testing.assert_close(
        joined.scaling * joined.b @ joined.a,
        sum(one.scaling * one.b @ one.a for one in (first, second)),
    )
    assert joined.a.requires_grad and joined.b.requires_grad
    assert HeadLoRA.joined([first]) is first and HeadLoRA.joined([]) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_opcheck(backend: str) -> None:
    posed = lora_problem(sequences=1, length=5).to("cpu", torch.float32, torch.float32)
    problem = posed.problem
    head = Head(problem.weight, problem.bias, Transform(temperature=1.5), posed.lora)
    rows = Rows(hidden=problem.hidden[0], head=head, target=problem.target[0])
    options = RunOptions(backend=backend, max_workspace_bytes=2 * 53 * 4)
    check_forward(rows, options)
    check_backward(rows, options, (torch.randn(5), None, None), (True, False, False, True, True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_weight_sized_tensor(backend: str) -> None:
    posed = lora_problem(sequences=1, length=3, hidden_size=64, vocab_size=999, rank=4)
    posed = posed.to("cpu", torch.float32, torch.float32).frozen()
    problem = posed.problem

    def run(weight: Tensor, lora: HeadLoRA | None) -> int:
        with largest_allocation() as seen:
            out = linear_logprobs(
                problem.hidden, weight, problem.target, lora=lora, backend=backend
            )
            assert out.logprobs is not None
            out.logprobs.sum().backward()
        return seen.elements

    assert 0 < run(problem.weight, posed.lora) < problem.weight.numel() / 2
    assert posed.lora.a.grad is not None and posed.lora.b.grad is not None
    assert run(posed.merged, None) >= problem.weight.numel()  # of its gradient


def test_explain_says_it() -> None:
    posed = lora_problem().to("cpu", torch.bfloat16, torch.float32)
    problem = posed.problem
    plan = explain_logprobs(problem.hidden, problem.weight, lora=posed.lora)
    assert "LoRA of rank 3" in plan.fingerprint
    assert "LoRA" not in explain_logprobs(problem.hidden, problem.weight).fingerprint
    if "triton" in available_backends():
        tiled = explain_logprobs(problem.hidden, problem.weight, lora=posed.lora, backend="triton")
        assert tiled.forward.startswith("logits tile")


A, B = torch.zeros(3, 16), torch.zeros(53, 3)


@pytest.mark.parametrize(
    "lora,message",
    [
        ((A, B), "lora: expected a HeadLoRA or None, got tuple"),
        (HeadLoRA(a=A[:, 1:], b=B), r"lora\.a: expected shape \(r, 16\), r > 0, got \(3, 15\)"),
        (HeadLoRA(a=A[:0], b=B), r"lora\.a: expected shape .* got \(0, 16\)"),
        (HeadLoRA(a=A[0], b=B), r"lora\.a: expected shape .* got \(16,\)"),
        (HeadLoRA(a=A, b=B[1:]), r"lora\.b: expected shape \(53, 3\) .* got \(52, 3\)"),
        (HeadLoRA(a=A, b=B[:, :2]), r"lora\.b: expected shape \(53, 3\) .* got \(53, 2\)"),
        (HeadLoRA(a=A.long(), b=B), r"lora\.a: expected one of torch\.float32.* got torch\.int64"),
        (HeadLoRA(a=A, b=None), r"lora\.b: expected a tensor, got NoneType"),
        (HeadLoRA(a=A, b=B.to("meta")), r"lora\.b: expected device cpu .* got meta"),
        (HeadLoRA(a=A, b=B, scaling=float("nan")), r"lora\.scaling: expected a finite number"),
        (HeadLoRA(a=A, b=B, scaling=None), r"lora\.scaling: expected a finite number"),
    ],
)
def test_wrong_adapters(lora: object, message: str) -> None:
    problem = lora_problem().problem.to("cpu", torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_logprobs(problem.hidden, problem.weight, problem.target, lora=lora)  # type: ignore[arg-type]
