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
    SamplingMask,
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
from grpo_kernels.testing import relative_error
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


def backends(dtype: torch.dtype) -> list[str]:
    return ["cpu", "chunked"] if dtype == torch.float32 else ["cpu"]


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("tolerance", (1e-2, 2e-3))
@pytest.mark.parametrize("dtype,backend", [(d, b) for d in ROUNDING for b in backends(d)], ids=str)
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


@pytest.mark.parametrize(
    "scores",
    (
        pytest.param(torch.zeros(COLUMNS), id="uniform"),
        pytest.param(torch.zeros(COLUMNS).index_fill_(0, torch.tensor([5, 9]), 30.0), id="peaks"),
        pytest.param(torch.zeros(COLUMNS).index_fill_(0, torch.tensor([7]), 12.0), id="tail"),
        pytest.param(torch.zeros(COLUMNS).index_fill_(0, torch.tensor([5]), 12.0), id="sure"),
        pytest.param(
            torch.linspace(-20, 5, COLUMNS).index_fill_(0, torch.arange(0, 4000, 3), -torch.inf),
            id="infinite",
        ),
    ),
)
@pytest.mark.parametrize("temperature", (1.0, 1e4))
def test_adversarial_rows(scores: Tensor, temperature: float) -> None:
    """All rows have these logits; the target is the sixth id, in most of them in the tail."""
    generator = torch.Generator().manual_seed(1)
    target = torch.full((8,), 5)
    bias = scores.index_fill(0, target[:1], max(float(scores[5]), -30.0))
    weight = torch.randn(COLUMNS, DEPTH, generator=generator) * 1e-3
    hidden = torch.randn(8, DEPTH, generator=generator)
    found = {}
    for name, dtype, options in (
        ("exact", torch.float64, dict(backend="reference")),
        ("bounded", torch.float32, dict(backward=sparse(slots=1024))),
    ):
        x, w = (y.to(dtype).requires_grad_() for y in (hidden, weight))
        out = linear_logprobs(x, w, target, bias=bias.to(dtype), temperature=temperature, **options)
        found[name] = torch.autograd.grad(out.logprobs.sum(), (x, w))
    for value, exact in zip(found["bounded"], found["exact"], strict=True):
        assert frobenius(value, exact) <= 2e-3


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


def test_exact_weight() -> None:
    x = inputs("SFT-like").to(torch.float32)
    exact = gradients(x)
    got = gradients(x, backward=Bounded(slots=SLOTS))
    assert frobenius(got["dweight"], exact["dweight"].double()) < 1e-6
    assert 1e-5 < frobenius(got["dhidden"], exact["dhidden"].double()) < 2e-3


@pytest.mark.parametrize("exact_weight", (False, True))
def test_every_gradient_of_a_head(exact_weight: bool) -> None:
    x = inputs("SFT-like")
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn(COLUMNS, generator=generator)
    a, b = torch.randn(4, DEPTH, generator=generator), torch.randn(COLUMNS, 4, generator=generator)
    found = {}
    for name, dtype, options in (
        ("exact", torch.float64, dict(backend="reference")),
        ("bounded", torch.float32, dict(backward=sparse(exact_weight=exact_weight))),
    ):
        leaves = [y.to(dtype).requires_grad_() for y in (x.hidden, x.weight, bias, a, b)]
        lora = HeadLoRA(a=leaves[3], b=leaves[4], scaling=0.3)
        out = linear_logprobs(
            leaves[0], leaves[1], x.target, bias=leaves[2], lora=lora, softcap=40.0,
            temperature=torch.linspace(0.7, 1.3, TOKENS).to(dtype), logit_scale=0.9, **options,
        )  # fmt: skip
        found[name] = torch.autograd.grad(out.logprobs, leaves, x.dlogp.to(out.logprobs.dtype))
    names = ("dhidden", "dweight", "dbias", "da", "db")
    for name, value, exact in zip(names, found["bounded"], found["exact"], strict=True):
        of_head = name in ("dweight", "dbias", "db")
        allowed = 5e-6 if of_head and exact_weight else 2e-3
        assert frobenius(value, exact) <= allowed, name


@pytest.mark.parametrize("loss_type", ("dapo", "gspo"))
@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
def test_a_loss_of_an_adapter(loss_type: str, schedule: str) -> None:
    x = inputs("SFT-like")
    generator = torch.Generator().manual_seed(3)
    a, b = torch.randn(4, DEPTH, generator=generator), torch.randn(COLUMNS, 4, generator=generator)
    found = {}
    for name, dtype, options in (
        ("exact", torch.float64, dict(backend="reference")),
        ("bounded", torch.float32, dict(schedule=schedule, backward=Bounded(slots=SLOTS))),
    ):
        hidden = x.hidden.to(dtype).view(8, -1, DEPTH).requires_grad_()
        lora = HeadLoRA(a=a.to(dtype).requires_grad_(), b=b.to(dtype).requires_grad_(), scaling=0.3)
        batch = TokenBatch.from_padded(x.target.view(8, -1), torch.linspace(-1, 1.5, 8).to(dtype))
        out = linear_policy_loss(
            hidden, x.weight.to(dtype), batch, LossConfig(loss_type=loss_type), lora=lora, **options
        )
        found[name] = torch.autograd.grad(out.loss, (hidden, lora.a, lora.b))
    for value, exact, allowed in zip(*found.values(), (2e-3, 2e-3, 5e-6), strict=True):
        assert frobenius(exact, value.double()) <= allowed


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


@pytest.mark.parametrize("tokens", (0, 3))
@pytest.mark.parametrize("exact_weight", (False, True))
def test_no_row_with_a_target(tokens: int, exact_weight: bool) -> None:
    hidden = torch.randn(tokens, DEPTH, requires_grad=True)
    weight = torch.randn(COLUMNS, DEPTH, requires_grad=True)
    target = torch.full((tokens,), -100)
    names, backward = ("logprobs", "entries", "gradient_error"), sparse(exact_weight=exact_weight)
    out = linear_logprobs(hidden, weight, target, outputs=names, backward=backward)
    assert out.entries.shape == (tokens,) and not out.gradient_error.any()
    dhidden, dweight = torch.autograd.grad(out.logprobs.sum(), (hidden, weight))
    assert dhidden.shape == hidden.shape and not dhidden.any() and not dweight.any()


@pytest.mark.parametrize("way", ("logprobs", "one_pass", "two_pass"))
@pytest.mark.parametrize("exact_weight", (False, True))
def test_an_fp32_weight_under_autocast(way: str, exact_weight: bool) -> None:
    """Its gradient is not rounded to the 16 bits that it is multiplied in."""
    x, narrow = inputs("SFT-like").to(torch.float32), inputs("SFT-like").to(torch.bfloat16)
    backward = sparse(exact_weight=exact_weight)
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.linspace(-1, 1.5, 8))
    found = []
    for y in (x, narrow):
        with torch.autocast("cpu", torch.bfloat16, enabled=y is x):
            if way == "logprobs":
                out = linear_logprobs(y.hidden, y.weight, y.target, backward=backward)
                total = (out.logprobs * y.dlogp.to(out.logprobs.dtype)).sum()
            else:
                total = linear_policy_loss(
                    y.hidden.view(8, -1, DEPTH), y.weight, batch, LossConfig(),
                    schedule=way, backward=backward,
                ).loss  # fmt: skip
        found.append(torch.autograd.grad(total, y.weight)[0])
    wide, rounded = found
    assert wide.dtype == torch.float32 and rounded.dtype == torch.bfloat16
    one_step = dict(rtol=2**-7, atol=0.0)  # another order of sums may round to the next number
    torch.testing.assert_close(wide.bfloat16(), rounded, **one_step)
    assert not torch.equal(wide.bfloat16().float(), wide)


@pytest.mark.parametrize("loss_type", ("dapo", "gspo", "grpo"))
@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
def test_losses(loss_type: str, schedule: str) -> None:
    x = inputs("policy-like")
    found = {}
    for name, dtype, options in (
        ("exact", torch.float64, dict(backend="reference")),
        ("bounded", torch.float32, dict(schedule=schedule, backward=sparse())),
    ):
        y = x.to(dtype)
        advantages = torch.linspace(-1, 1.5, 8, dtype=dtype)
        batch = TokenBatch.from_padded(x.target.view(8, -1), advantages)
        hidden = y.hidden.detach().view(8, -1, DEPTH).requires_grad_()
        out = linear_policy_loss(
            hidden, y.weight, batch, LossConfig(loss_type=loss_type), **options
        )
        found[name] = torch.autograd.grad(out.loss, (hidden, y.weight))
    for value, exact in zip(found["bounded"], found["exact"], strict=True):
        assert frobenius(value, exact) <= 2e-3
    metrics = out.metrics
    assert 0 < metrics["backward_error"] < 2e-3
    assert 1 <= metrics["backward_entries"] < SLOTS and 0 <= metrics["backward_whole_rows"] < 0.5
    assert metrics["backward_error_bound"] > 0


@pytest.mark.parametrize("exact_weight", (False, True))
def test_a_batch_without_a_gradient_has_the_same_metrics(exact_weight: bool) -> None:
    x = inputs("policy-like").to(torch.float32)
    hidden = x.hidden.detach().view(8, -1, DEPTH).requires_grad_()
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.zeros(8))
    names = []
    for schedule in ("one_pass", "two_pass"):
        options = dict(schedule=schedule, backward=Bounded(exact_weight=exact_weight))
        out = linear_policy_loss(hidden, x.weight, batch, LossConfig(), **options)
        names.append(set(out.metrics))
        gradients = torch.autograd.grad(out.loss, (hidden, x.weight))
        assert not any(gradient.any() for gradient in gradients)
    assert names[0] == names[1] >= {"backward_entries", "backward_error"}


def test_explain_one_pass() -> None:
    x = inputs("policy-like").to(torch.float32)
    hidden = x.hidden.view(8, -1, DEPTH)
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.ones(8))
    for exact_weight, text in ((False, "1 GEMM in all"), (True, "2 GEMMs in all")):
        backward = Bounded(exact_weight=exact_weight)
        plan = explain(hidden, x.weight, batch, LossConfig(), backward=backward)
        assert plan.schedule == "one_pass" and text in str(plan)


def test_main_grad() -> None:
    x = inputs("policy-like").to(torch.float32)
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.linspace(-1, 1.5, 8))
    hidden = x.hidden.detach().view(8, -1, DEPTH).requires_grad_()
    options = dict(schedule="one_pass", backward=sparse())
    out = linear_policy_loss(hidden, x.weight, batch, LossConfig(), **options)
    (expected,) = torch.autograd.grad(out.loss, (x.weight,))
    total = torch.ones_like(x.weight)
    for scale in (None, 1.0):
        out = linear_policy_loss(
            hidden, x.weight, batch, LossConfig(), main_grad=total, gradient_scale=scale, **options
        )
        out.loss.backward()
    torch.testing.assert_close(total - 1, 2 * expected, rtol=1e-4, atol=1e-6)


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


def test_a_gradient_through_the_entropy_is_exact() -> None:
    x = inputs("policy-like").to(torch.float32)
    found = []
    for options in (dict(), dict(backward=sparse())):
        out = linear_logprobs(
            x.hidden, x.weight, x.target, outputs=("logprobs", "entropy"), **options
        )
        found.append(torch.autograd.grad(out.entropy.sum() + out.logprobs.sum(), (x.hidden,))[0])
    assert relative_error(found[1], found[0].double()) < 1e-5


def test_bad_input() -> None:
    x = inputs("policy-like").to(torch.float32)
    for options, message in (
        (dict(tolerance=0.0), "tolerance: expected a float in"),
        (dict(tolerance="small"), "tolerance: expected a float in"),
        (dict(slots=0), "slots: expected an int of at least 1"),
        (dict(seed=-1), "seed: expected an int in"),
    ):
        with pytest.raises(ValueError, match=message):
            Bounded(**options)
    with pytest.raises(ValueError, match="backward: expected 'exact' or a Bounded, got 'fast'"):
        linear_logprobs(x.hidden, x.weight, x.target, backward="fast")
    mask = SamplingMask.from_padded(x.target[:, None])
    with pytest.raises(ValueError, match="backward: expected 'exact' for masked_logprobs"):
        linear_logprobs(
            x.hidden, x.weight, x.target, outputs=("masked_logprobs",), sampling_mask=mask,
            backward=Bounded(),
        )  # fmt: skip
    with pytest.raises(ValueError, match="outputs: expected entries, gradient_error"):
        linear_logprobs(x.hidden, x.weight, x.target, outputs=("entries",))
    batch = TokenBatch.from_padded(x.target.view(8, -1), torch.ones(8))
    hidden = x.hidden.view(8, -1, DEPTH)
    with pytest.raises(ValueError, match="backward: expected 'exact', since the gradient through"):
        linear_policy_loss(
            hidden, x.weight, batch, LossConfig(entropy_coef=0.1), backward=Bounded()
        )


def test_explain() -> None:
    x = inputs("policy-like").to(torch.float32)
    for backward, count in ((Bounded(), "3 GEMMs"), (sparse(), "1 GEMM")):
        text = str(explain_logprobs(x.hidden, x.weight, backward=backward))
        assert "keeps entries" in text and f"{count} in all" in text
        assert str(backward) in text  # in the fingerprint
