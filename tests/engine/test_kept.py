"""Backwards that form no logit twice: what the forward keeps, and that it is as exact."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from grpo_kernels import (
    HeadLoRA,
    LossConfig,
    TokenBatch,
    explain,
    explain_logprobs,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, project
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_problem,
    poisoned_allocations,
)
from tests.support.heads import HEADS, head_options
from tests.support.op_checks import check_backward, check_forward
from tests.support.targets import targets

ENOUGH = 1 << 20
# in 16 bits one and a half units of the last place: two roundings, and the interpreter cuts off
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 1.5 * 2**-7, torch.float16: 1.5 * 2**-10}
SEVERAL_CHUNKS = 53 * 4 * 3


def weighted(target: Tensor) -> Tensor:
    """Return a gradient for each log-probability, some of them 0."""
    generator = torch.Generator().manual_seed(5)
    dlogp = torch.randn(target.shape, generator=generator, dtype=torch.float64)
    dlogp.view(-1)[::5] = 0
    return dlogp.to(target.device)


def run(problem: Problem, head: str, of_head: bool, **options: object) -> dict[str, Tensor]:
    target = torch.where(problem.mask, problem.target, -100)
    weight, bias = problem.weight, problem.bias
    if not of_head:
        weight, bias = weight.detach(), bias.detach()
    out = linear_logprobs(
        problem.hidden, weight, target, bias=bias, **head_options(head, target), **options
    )
    inputs = {"dhidden": problem.hidden, "dweight": weight, "dbias": bias}
    inputs = {name: x for name, x in inputs.items() if x.requires_grad}
    total = (out.logprobs.double() * weighted(target)).sum()
    gradients = torch.autograd.grad(total, list(inputs.values()))
    return {"logprobs": out.logprobs.detach(), **dict(zip(inputs, gradients, strict=True))}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("of_head", (False, True))
def test_kept_gradients_match_fp64(
    backend: str, device: torch.device, head: str, dtype: torch.dtype, of_head: bool
) -> None:
    problem = make_problem()
    exact = run(problem.to("cpu", torch.float64), head, of_head, backend="reference")
    eager = run(problem.to(device, dtype), head, of_head, backend="reference")
    with poisoned_allocations():
        got = run(
            problem.to(device, dtype), head, of_head, backend=backend, activation_bytes=ENOUGH,
            max_workspace_bytes=SEVERAL_CHUNKS,
        )  # fmt: skip
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], min(FLOOR[dtype], 2e-6))


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
def test_fp64(of_head: bool) -> None:
    problem = make_problem()
    exact = run(problem, "softcapped", of_head, backend="reference")
    got = run(problem, "softcapped", of_head, backend="chunked", activation_bytes=ENOUGH)
    for name, value in got.items():
        torch.testing.assert_close(value, exact[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("of_head", (False, True))
def test_no_logit_is_formed_twice(monkeypatch: pytest.MonkeyPatch, of_head: bool) -> None:
    formed: list[int] = []

    def counted(hidden: Tensor, head: Head, out: Tensor) -> Tensor:
        formed.append(out.numel())
        return project(hidden, head, out)

    for name in ("sweep", "recompute"):  # the first is also the name of a function
        module = sys.modules[f"grpo_kernels.engine.{name}"]
        monkeypatch.setattr(module, "project", counted)
    problem = make_problem().to("cpu", torch.float32)
    count = int(problem.mask.sum()) * 53
    for budget, times in ((ENOUGH, 1), (0, 2), (None, 2 if of_head else 1)):
        formed.clear()
        run(problem, "plain", of_head, backend="chunked", activation_bytes=budget)
        assert sum(formed) <= times * count
        assert sum(formed) > (times - 1) * count


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


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("of_head", (False, True))
@pytest.mark.parametrize("tokens", (0, 3))
def test_no_row_with_a_target(
    backend: str, device: torch.device, of_head: bool, tokens: int
) -> None:
    hidden = torch.randn(tokens, 8, device=device, requires_grad=True)
    weight = torch.randn(40, 8, device=device, requires_grad=of_head)
    target = torch.full((tokens,), -100, device=device)
    out = linear_logprobs(hidden, weight, target, backend=backend, activation_bytes=ENOUGH)
    inputs = (hidden, weight) if of_head else (hidden,)
    gradients = torch.autograd.grad(out.logprobs.sum(), inputs)
    assert all(x.shape == y.shape and not x.any() for x, y in zip(gradients, inputs, strict=True))


@pytest.mark.parametrize("of_head", (False, True))
def test_a_gradient_through_the_entropy_forms_the_logits_anew(of_head: bool) -> None:
    problem = make_problem().to("cpu", torch.float32)
    found = []
    for budget in (ENOUGH, 0):
        weight = problem.weight.detach().requires_grad_(of_head)
        out = linear_logprobs(
            problem.hidden, weight, problem.target, outputs=("logprobs", "entropy"),
            backend="chunked", activation_bytes=budget,
        )  # fmt: skip
        inputs = (problem.hidden, weight) if of_head else (problem.hidden,)
        found.append(torch.autograd.grad(out.logprobs.sum() + out.entropy.sum(), inputs))
    for kept, anew in zip(*found, strict=True):
        torch.testing.assert_close(kept, anew)


@pytest.mark.parametrize("of_head", (False, True))
def test_a_second_backward_gives_the_same(of_head: bool) -> None:
    problem = make_problem().to("cpu", torch.bfloat16)
    weight = problem.weight.detach().requires_grad_(of_head)
    out = linear_logprobs(problem.hidden, weight, problem.target, activation_bytes=ENOUGH)
    inputs = (problem.hidden, weight) if of_head else (problem.hidden,)
    first, second = (
        torch.autograd.grad(out.logprobs.sum(), inputs, retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@pytest.mark.parametrize("trained", ("a and b", "nothing"))
def test_an_adapter_of_the_head(trained: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    generator = torch.Generator().manual_seed(1)
    factors = [torch.randn(*size, generator=generator) for size in ((3, 16), (53, 3))]
    depth = problem.weight.shape[1]
    a, b = factors[0][:, :1].expand(3, depth).clone(), factors[1]

    def gradients(dtype: torch.dtype, **options: object) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.hidden, a, b)]
        lora = HeadLoRA(a=leaves[1], b=leaves[2], scaling=0.5)
        if trained == "nothing":
            lora, leaves = replace(lora, a=lora.a.detach(), b=lora.b.detach()), leaves[:1]
        weight = problem.weight.detach().to(dtype)
        out = linear_logprobs(leaves[0], weight, problem.target, lora=lora, **options)
        dlogp = weighted(problem.target).to(out.logprobs.dtype)
        return list(torch.autograd.grad(out.logprobs, leaves, dlogp))

    exact = gradients(torch.float64, backend="reference")
    for value, expected in zip(
        gradients(torch.float32, activation_bytes=ENOUGH), exact, strict=True
    ):
        torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("loss_type", LOSSES)
@pytest.mark.parametrize("of_head", (False, True))
def test_two_passes_keep_as_well(loss_type: str, of_head: bool) -> None:
    """Every loss, with softcap, bias and a reference; against fp64 and two ways without."""
    problem = make_problem()
    config = LossConfig(loss_type=loss_type, beta=0.1, max_completion_length=9)
    found = []
    for dtype, options in (
        (torch.float64, dict(backend="reference")),
        (torch.float32, dict(backend="reference")),
        (torch.float32, dict(schedule="two_pass", activation_bytes=ENOUGH)),
        (torch.float32, dict(schedule="two_pass", activation_bytes=0)),
    ):
        x = problem.to("cpu", dtype)
        weight = x.weight.detach().requires_grad_(of_head)
        logp = linear_logprobs(
            x.hidden.detach(), weight.detach(), x.target, backend="reference"
        ).logprobs
        batch = TokenBatch.from_padded(
            x.target, torch.linspace(-1, 1, len(x.target), dtype=dtype), x.mask,
            old_logprobs=logp + 0.1, ref_logprobs=logp - 0.2,
        )  # fmt: skip
        out = linear_policy_loss(
            x.hidden, weight, batch, config, bias=x.bias.detach(), softcap=30.0, **options,
        )  # fmt: skip
        inputs = (x.hidden, weight) if of_head else (x.hidden,)
        values = (out.loss, *torch.autograd.grad(out.loss, inputs))
        found.append(dict(zip(("loss", "dhidden", "dweight"), values, strict=False)))
    exact, eager, *others = found
    for values in others:
        assert_all_as_exact_as(values, eager, exact, 1e-6, 2e-6)


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


@pytest.mark.parametrize("bad", (-1, 1.5, True, "all"))
def test_bad_activation_bytes(bad: object) -> None:
    with pytest.raises(ValueError, match="^activation_bytes: expected"):
        linear_logprobs(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2).long(), activation_bytes=bad
        )
