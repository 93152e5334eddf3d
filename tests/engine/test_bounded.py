"""The bounded backward: within its tolerance, right in the mean, and honest about its error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Bounded,
    HeadLoRA,
    LossConfig,
    TokenBatch,
    explain,
    explain_logprobs,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import Entries
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.engine.bounded import of_kept, to_keep
from grpo_kernels.head import Head
from tests.support.op_checks import check_backward, check_forward

TOKENS, DEPTH, COLUMNS = 192, 64, 4000
# standard deviations of the logits: as of a policy in RL, and of a model of plain text
SIZES = {"policy-like": 24.0, "SFT-like": 8.0}
SLOTS = 1500
# beside the tolerance: rounding to 16 bits, of the gradients and of what they are made from
ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2.5e-3, torch.float16: 4e-4}


def sparse(**options: Any) -> Bounded:
    """Return a backward whose gradients are all from entries."""
    return Bounded(**{"slots": SLOTS, "exact_weight": False} | options)


@dataclass(frozen=True)
class Inputs:
    hidden: Tensor
    weight: Tensor
    target: Tensor
    dlogp: Tensor

    def to(self, dtype: torch.dtype) -> Inputs:
        hidden, weight = self.hidden.to(dtype), self.weight.to(dtype)
        return Inputs(hidden.requires_grad_(), weight.requires_grad_(), self.target, self.dlogp)


@cache
def inputs(kind: str) -> Inputs:
    """Return inputs that 16 bits hold exactly, with targets drawn from the policy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DEPTH, generator=generator).bfloat16().float()
    weight = torch.randn(COLUMNS, DEPTH, generator=generator) * SIZES[kind] / math.sqrt(DEPTH)
    weight = weight.half().bfloat16().float()
    target = torch.multinomial((hidden @ weight.t()).softmax(1), 1, generator=generator)[:, 0]
    dlogp = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    dlogp[::7] = 0
    return Inputs(hidden, weight, target, dlogp)


def gradients(x: Inputs, dlogp: Tensor | None = None, **options: object) -> dict[str, Tensor]:
    out = linear_logprobs(x.hidden, x.weight, x.target, **options)
    dlogp = (x.dlogp if dlogp is None else dlogp).to(out.logprobs.dtype)
    leaves = {n: y for n, y in (("dhidden", x.hidden), ("dweight", x.weight)) if y.requires_grad}
    found = torch.autograd.grad(out.logprobs, list(leaves.values()), dlogp)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_what_is_kept_is_as_it_was(dtype: torch.dtype) -> None:
    """Ids beyond 2**24 too, which fp32 does not count."""
    ids = torch.tensor([[2**24 + 1, 5, 2**31 - 1], [0, 0, 0]], dtype=torch.int32)
    used, floats = torch.tensor([3, -1], dtype=torch.int32), torch.rand(2, 7, dtype=dtype)
    entries, allowed = Entries(ids, floats[:, :3], used, *floats[:, 3:6].unbind(1)), floats[:, 6]
    kept = of_kept(to_keep(entries, allowed))
    for got, want in zip((*kept[0], kept[1]), (*entries, allowed), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def frobenius(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tolerance", (1e-2, 2e-3))
@pytest.mark.parametrize(
    "backend,dtype", [("chunked", torch.float32), *(("cpu", dtype) for dtype in ROUNDING)], ids=str
)
def test_the_error_is_within_the_tolerance(
    kind: str, tolerance: float, dtype: torch.dtype, backend: str
) -> None:
    x = inputs(kind)
    exact = gradients(x.to(torch.float64), backend="reference")
    got = gradients(x.to(dtype), backward=sparse(tolerance=tolerance), backend=backend)
    for name, value in got.items():
        assert frobenius(value, exact[name]) <= tolerance + ROUNDING[dtype], name


def test_gradients_that_favour_rows_with_little_of_one() -> None:
    """What a row was allowed before its gradient was known would be too much."""
    x = inputs("policy-like")
    logp = linear_logprobs(x.hidden, x.weight, x.target).logprobs
    dlogp = 1 / (-torch.expm1(logp)).clamp(min=1e-4).double()
    exact = gradients(x.to(torch.float64), dlogp, backend="reference")
    got = gradients(x.to(torch.float32), dlogp, backward=sparse())
    for name, value in got.items():
        assert frobenius(value, exact[name]) <= 2e-3, name


def scores_of(kind: str) -> Tensor:
    places = {"uniform": [], "peaks": [5, 9], "tail": [7], "sure": [5], "infinite": []}[kind]
    size = 30.0 if kind == "peaks" else 12.0
    scores = torch.zeros(COLUMNS).index_fill(0, torch.tensor(places, dtype=torch.int64), size)
    if kind == "infinite":
        absent = torch.arange(0, COLUMNS, 3)
        scores = torch.linspace(-20, 5, COLUMNS).index_fill(0, absent, -torch.inf)
    return scores


@pytest.mark.parametrize("kind", ("uniform", "peaks", "tail", "sure", "infinite"))
@pytest.mark.parametrize("temperature", (1.0, 1e4))
def test_adversarial_rows(kind: str, temperature: float) -> None:
    """All rows have these logits; the target is the sixth id, in most of them in the tail."""
    generator, scores = torch.Generator().manual_seed(1), scores_of(kind)
    target = torch.full((8,), 5)
    bias = scores.index_fill(0, target[:1], max(float(scores[5]), -30.0))
    weight = torch.randn(COLUMNS, DEPTH, generator=generator) * 1e-3
    hidden = torch.randn(8, DEPTH, generator=generator)

    def gradients(dtype: torch.dtype, **options: object) -> tuple[Tensor, ...]:
        x, w = (y.to(dtype).requires_grad_() for y in (hidden, weight))
        options |= dict(bias=bias.to(dtype), temperature=temperature)
        return torch.autograd.grad(linear_logprobs(x, w, target, **options).logprobs.sum(), (x, w))

    exact = gradients(torch.float64, backend="reference")
    got = gradients(torch.float32, backward=sparse(slots=1024))
    assert all(frobenius(*pair) <= 2e-3 for pair in zip(got, exact, strict=True))


@pytest.mark.parametrize("kind", SIZES)
def test_the_bound_is_never_under_the_error(kind: str) -> None:
    x = inputs(kind).to(torch.float32)
    names = ("logprobs", "entries", "gradient_error", "gradient_error_bound")
    backward = sparse(tolerance=2e-2)
    out = linear_logprobs(x.hidden, x.weight, x.target, outputs=names, backward=backward)
    (dhidden,) = torch.autograd.grad(out.logprobs.sum(), (x.hidden,))
    y = inputs(kind).to(torch.float64)
    ones = torch.ones_like(y.dlogp)
    exact = gradients(y, ones, backend="reference")["dhidden"]
    error = (dhidden.double() - exact).norm(dim=1)
    longest = y.weight.norm(dim=1).max()
    rounding = 1e-6 * longest
    assert (error <= out.gradient_error_bound * longest + rounding).all()
    assert (out.entries[out.entries >= 0] <= SLOTS).all() and (out.entries > 0).any()
    assert 0 < out.gradient_error.median() < 1


@pytest.mark.parametrize("kind", SIZES)
def test_right_in_the_mean(kind: str) -> None:
    """The mean over 1,000 seeds is the exact gradient, within its own standard error.

    The error of a mean of n unbiased samples is 1 / sqrt(n) of one's. Here that is a thirtieth, and
    five times a thirtieth is allowed in the norm: a bias of a sixth of one sample's error fails.
    """
    x, count = inputs(kind).to(torch.float32), 1000
    rows = slice(0, 24)
    x = Inputs(
        x.hidden.detach()[rows].requires_grad_(), x.weight.detach(), x.target[rows], x.dlogp[rows]
    )
    # a backward for each seed would be slow: the seeds stand beside each other as rows
    wide = Inputs(
        x.hidden.detach().repeat(count, 1).requires_grad_(),
        x.weight, x.target.repeat(count), x.dlogp.repeat(count),
    )  # fmt: skip
    exact = gradients(x)["dhidden"].double()
    got = gradients(wide, backward=sparse(tolerance=5e-2))["dhidden"]
    errors = got.double().view(count, *exact.shape) - exact
    single = errors.norm(dim=(1, 2)).mean()
    assert single > 20 * 1e-6 * exact.norm()  # there is something to average out
    assert errors.mean(0).norm() < 5 * single / math.sqrt(count)


def test_seeds_and_runs() -> None:
    x = inputs("SFT-like").to(torch.float32)
    first, again, other = (gradients(x, backward=sparse(seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("exact_weight", (False, True))
def test_every_gradient_of_a_head(exact_weight: bool) -> None:
    x = inputs("SFT-like")
    generator = torch.Generator().manual_seed(3)
    more = [torch.randn(*size, generator=generator) for size in ((COLUMNS,), (4, DEPTH))]
    more.append(torch.randn(COLUMNS, 4, generator=generator))

    def gradients(dtype: torch.dtype, **options: object) -> dict[str, Tensor]:
        leaves = [y.to(dtype).requires_grad_() for y in (x.hidden, x.weight, *more)]
        out = linear_logprobs(
            leaves[0], leaves[1], x.target, bias=leaves[2], softcap=40.0, logit_scale=0.9,
            lora=HeadLoRA(a=leaves[3], b=leaves[4], scaling=0.3),
            temperature=torch.linspace(0.7, 1.3, TOKENS).to(dtype), **options,
        )  # fmt: skip
        found = torch.autograd.grad(out.logprobs, leaves, x.dlogp.to(out.logprobs.dtype))
        return dict(zip(("dhidden", "dweight", "dbias", "da", "db"), found, strict=True))

    exact = gradients(torch.float64, backend="reference")
    for name, value in gradients(torch.float32, backward=sparse(exact_weight=exact_weight)).items():
        of_head = exact_weight and name in ("dweight", "dbias", "db")
        assert frobenius(value, exact[name]) <= (5e-6 if of_head else 2e-3), name
        assert of_head or frobenius(value, exact[name]) > 1e-5, name


def test_rows_without_a_target_or_a_softmax() -> None:
    x = inputs("SFT-like").to(torch.float32)
    target = x.target.clone()
    target[3] = -100
    hidden = x.hidden.detach().clone()
    hidden[5] = torch.nan
    hidden.requires_grad_()
    out = linear_logprobs(hidden, x.weight, target, backward=sparse())
    dlogp = torch.ones(TOKENS)
    dlogp[5] = 0
    dhidden, dweight = torch.autograd.grad(out.logprobs, (hidden, x.weight), dlogp)
    assert dhidden.isfinite().all() and dweight.isfinite().all()
    assert not dhidden[[3, 5]].any()


@pytest.mark.parametrize("way", ("logprobs", "one_pass", "two_pass"))
@pytest.mark.parametrize("exact_weight", (False, True))
def test_an_fp32_weight_under_autocast(way: str, exact_weight: bool) -> None:
    """Its gradient is not rounded to the 16 bits that it is multiplied in."""
    backward = sparse(exact_weight=exact_weight)
    batch = TokenBatch.from_padded(inputs("SFT-like").target.view(8, -1), torch.linspace(-1, 1, 8))

    def gradient(x: Inputs) -> Tensor:
        if way == "logprobs":
            return gradients(x, backward=backward)["dweight"]
        args = (x.hidden.view(8, -1, DEPTH), x.weight, batch, LossConfig())
        out = linear_policy_loss(*args, schedule=way, backward=backward)
        return torch.autograd.grad(out.loss, x.weight)[0]

    with torch.autocast("cpu", torch.bfloat16):
        wide = gradient(inputs("SFT-like").to(torch.float32))
    rounded = gradient(inputs("SFT-like").to(torch.bfloat16))
    assert wide.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    one_step = dict(rtol=2**-7, atol=0.0)  # another order of sums may round to the next number
    torch.testing.assert_close(wide.bfloat16(), rounded, **one_step)
    assert not torch.equal(wide.bfloat16().float(), wide)


def test_compiled() -> None:
    x = inputs("policy-like").to(torch.float32)
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.linspace(-1, 1.5, 8))
    hidden = x.hidden.detach().view(8, -1, DEPTH).requires_grad_()

    config, backward = LossConfig(), sparse()

    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(hidden, weight, batch, config, backward=backward).loss

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        found.append(torch.autograd.grad(function(hidden, x.weight), (hidden, x.weight)))
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)


def test_opcheck() -> None:
    x = inputs("policy-like").to(torch.float32)
    rows = Rows(hidden=x.hidden, head=Head(x.weight), target=x.target)
    options = RunOptions(backend="chunked", backward=sparse(slots=64))
    check_forward(replace(rows, hidden=x.hidden[:5], target=x.target[:5]), options)
    few = replace(rows, hidden=x.hidden.detach()[:5].requires_grad_(), target=x.target[:5])
    check_backward(few, options, (torch.randn(5), None, None), (True, True, False, False, False))


@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize("exact_weight", (False, True))
def test_metrics_of_a_loss(schedule: str, exact_weight: bool) -> None:
    """They are there without a gradient, too."""
    x = inputs("policy-like").to(torch.float32)
    hidden = x.hidden.detach().view(8, -1, DEPTH).requires_grad_()
    options = dict(schedule=schedule, backward=sparse(exact_weight=exact_weight))
    found = []
    for advantages in (torch.linspace(-1, 1.5, 8), torch.zeros(8)):
        batch = TokenBatch.from_padded(x.target.view(8, -1), advantages)
        out = linear_policy_loss(hidden, x.weight, batch, LossConfig(), **options)
        gradients = torch.autograd.grad(out.loss, (hidden, x.weight))
        assert all(gradient.any() == advantages.any() for gradient in gradients)
        found.append(out.metrics)
    some, none = found
    assert set(some) == set(none)
    assert 0 < some["backward_error"] < 2e-3 and some["backward_error_bound"] > 0
    assert 1 <= some["backward_entries"] < SLOTS and 0 <= some["backward_whole_rows"] < 0.5


def test_explain() -> None:
    x = inputs("policy-like").to(torch.float32)
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.ones(8))
    of_loss = (x.hidden.view(8, -1, DEPTH), x.weight, batch, LossConfig())
    for backward, alone, in_a_loss in (
        (Bounded(), "3 GEMMs in all", "2 GEMMs in all"),
        (sparse(), "1 GEMM in all", "1 GEMM in all"),
    ):
        text = str(explain_logprobs(x.hidden, x.weight, backward=backward))
        assert "keeps entries" in text and alone in text
        assert str(backward) in text  # in the fingerprint
        plan = explain(*of_loss, backward=backward)
        assert plan.schedule == "one_pass" and in_a_loss in str(plan)
