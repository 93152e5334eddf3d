"""Backwards that form no logit twice: what the forward keeps, where and how it says so."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from grpo_kernels import (
    LossConfig,
    TokenBatch,
    explain,
    explain_logprobs,
    linear_logprobs,
)
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, project
from grpo_kernels.testing import make_problem
from tests.support.op_checks import check_backward, check_forward
from tests.support.targets import targets

ENOUGH = 1 << 20


@pytest.mark.parametrize("backend,device", targets())
def test_large_fp16_hidden_states(backend: str, device: torch.device) -> None:
    """They are multiplied by the rows' factors."""
    hidden = torch.tensor([[6e4, 1.0], [1.0, 1.0]], dtype=torch.float16, device=device)
    weight = torch.zeros(8, 2, dtype=torch.float16, device=device, requires_grad=True)
    target = torch.tensor([3, 5], device=device)
    out = linear_logprobs(hidden, weight, target, backend=backend, activation_bytes=ENOUGH)
    (dweight,) = torch.autograd.grad(out.logprobs, weight, torch.full_like(out.logprobs, 0.7))
    exact = torch.full((8,), -0.7 / 8 * 6e4)
    exact[3] *= -7
    torch.testing.assert_close(dweight[:, 0].float().cpu(), exact, rtol=2e-3, atol=1)


@pytest.mark.parametrize("of_head", (False, True))
def test_no_logit_is_formed_twice(monkeypatch: pytest.MonkeyPatch, of_head: bool) -> None:
    formed: list[int] = []

    def counted(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
        formed.append(out.numel())
        return project(hidden, head, out)

    for name in ("sweep", "recompute"):  # the first is also the name of a function
        module = sys.modules[f"grpo_kernels.engine.{name}"]
        monkeypatch.setattr(module, "project", counted)
    x = make_problem().to("cpu", torch.float32)
    weight, count = x.weight.detach().requires_grad_(of_head), x.target.numel() * 53
    for budget, times in ((ENOUGH, 1), (0, 2), (None, 2 if of_head else 1)):
        formed.clear()
        out = linear_logprobs(
            x.hidden, weight, x.target, backend="chunked", activation_bytes=budget
        )
        torch.autograd.grad(out.logprobs.sum(), (x.hidden, weight) if of_head else x.hidden)
        assert sum(formed) == times * count


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("of_head", (False, True))
def test_a_row_without_a_softmax_counts_where_it_has_a_gradient(
    backend: str, device: torch.device, of_head: bool
) -> None:
    problem = make_problem().to(device, torch.float32)
    hidden = problem.hidden.detach().clone()
    hidden[0, 1] = torch.nan
    hidden.requires_grad_()
    weight = problem.weight.detach().requires_grad_(of_head)
    for dlogp, spoilt in ((0.0, False), (1.0, True)):
        out = linear_logprobs(
            hidden, weight, problem.target, backend=backend, activation_bytes=ENOUGH
        )
        factor = torch.ones_like(out.logprobs)
        factor[0, 1] = dlogp
        inputs = (hidden, weight) if of_head else (hidden,)
        gradients = torch.autograd.grad(out.logprobs, inputs, factor)
        assert gradients[0][0, 1].isnan().all() == spoilt
        assert gradients[0][1:].isfinite().all()
        assert all(x.isfinite().all() != spoilt for x in gradients[1:])


def test_explain_says_what_is_kept() -> None:
    hidden, weight = torch.zeros(10, 8, requires_grad=True), torch.zeros(40, 8)
    assert "keeps dhidden, 0.0 MiB, 2 GEMMs" in str(explain_logprobs(hidden, weight))
    anew = str(explain_logprobs(hidden, weight, activation_bytes=0))
    assert "logits are formed again, 3 GEMMs" in anew
    weight.requires_grad_()
    anew = str(explain_logprobs(hidden, weight))
    assert (
        "logits are formed again, 4 GEMMs in all: activation_bytes=1600 would keep dlogits" in anew
    )
    kept = str(explain_logprobs(hidden, weight, activation_bytes=1600))
    assert "keeps dlogits, 0.0 MiB, 3 GEMMs" in kept
    batch = TokenBatch.from_padded(torch.zeros(2, 5, dtype=torch.int64), torch.ones(2))
    plan = explain(hidden.view(2, 5, 8), weight.detach(), batch, LossConfig(), schedule="two_pass")
    assert "keeps dhidden" in str(plan)


@pytest.mark.slow
@pytest.mark.parametrize("of_head", (False, True))
def test_compiled_for_any_number_of_rows(of_head: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    weight = torch.randn(40, 8, requires_grad=of_head)

    def step(hidden: Tensor, target: Tensor) -> Tensor:
        return linear_logprobs(hidden, weight, target).logprobs

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for rows in (7, 9, 12):
        hidden, target = torch.randn(rows, 8, requires_grad=True), torch.arange(rows)
        found = [
            torch.autograd.grad(f(hidden, target).sum(), (hidden,))[0] for f in (step, compiled)
        ]
        assert torch.equal(*found)
    assert counters["stats"]["unique_graphs"] <= 2  # the second for any number


@pytest.mark.parametrize("of_head", (False, True))
def test_opcheck(of_head: bool) -> None:
    problem = make_problem(1, 5, values_in=torch.float32).to("cpu", torch.float32)
    head = Head(problem.weight.detach().requires_grad_(of_head))
    rows = Rows(hidden=problem.hidden[0], head=head, target=problem.target[0])
    options = RunOptions(backend="chunked", activation_bytes=ENOUGH)
    check_forward(rows, options)
    needs = (True, of_head, False, False, False)
    check_backward(rows, options, (torch.randn(5), None, None), needs)
