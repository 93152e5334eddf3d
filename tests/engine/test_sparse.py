"""The sparse backward: within its tolerance, right in the mean, and honest about its error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Bounded,
    LossConfig,
    SamplingMask,
    TokenBatch,
    linear_logprobs,
    linear_policy_loss,
)
from tests.support.targets import targets

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
def inputs(kind: str, tokens: int = TOKENS, columns: int = COLUMNS) -> Inputs:
    """Return inputs that 16 bits hold exactly, with targets drawn from the policy."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, DEPTH, generator=generator).bfloat16().float()
    weight = torch.randn(columns, DEPTH, generator=generator) * SIZES[kind] / math.sqrt(DEPTH)
    weight = weight.half().bfloat16().float()
    target = torch.multinomial((hidden @ weight.t()).softmax(1), 1, generator=generator)[:, 0]
    dlogp = torch.randn(tokens, generator=generator, dtype=torch.float64)
    dlogp[::7] = 0
    return Inputs(hidden, weight, target, dlogp)


def gradients(x: Inputs, dlogp: Tensor | None = None, **options: object) -> dict[str, Tensor]:
    out = linear_logprobs(x.hidden, x.weight, x.target, **options)
    dlogp = (x.dlogp if dlogp is None else dlogp).to(out.logprobs.dtype)
    leaves = {n: y for n, y in (("dhidden", x.hidden), ("dweight", x.weight)) if y.requires_grad}
    found = torch.autograd.grad(out.logprobs, list(leaves.values()), dlogp)
    return dict(zip(leaves, found, strict=True))


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


@pytest.mark.parametrize("columns,dtype", zip((262_144, 262_145, 262_145), ROUNDING, strict=True))
def test_a_large_vocabulary(dtype: torch.dtype, columns: int) -> None:
    """Rows keep entries: none has to be computed whole."""
    x = inputs("policy-like", 24, columns)
    exact = gradients(x.to(torch.float64), backend="reference")
    backward = sparse(tolerance=1e-2)
    got = gradients(x.to(dtype), backward=backward)
    for name, value in got.items():
        assert frobenius(value, exact[name]) <= 1e-2 + ROUNDING[dtype], name
    y = x.to(dtype)
    names = ("logprobs", "entries")
    out = linear_logprobs(y.hidden, y.weight, y.target, outputs=names, backward=backward)
    assert (out.entries >= 0).all()


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("backend,device", targets("triton"))
def test_right_in_the_mean(kind: str, backend: str, device: torch.device) -> None:
    """The mean over many seeds is the exact gradient, within its own standard error.

    The error of a mean of n unbiased samples is 1 / sqrt(n) of one's. With 1,000 that is a
    thirtieth, and five times a thirtieth is allowed in the norm: a bias of a sixth of one sample's
    error fails. Torch draws the same sample, but slowly: there 250 seeds detect a bias of a third.
    """
    x, count = inputs(kind).to(torch.float32), 250 if backend == "chunked" else 1000
    rows = slice(0, 24)
    tensors = (x.hidden[rows], x.weight, x.target[rows], x.dlogp[rows])
    x = Inputs(*(tensor.detach().to(device) for tensor in tensors))
    x.hidden.requires_grad_()
    # a backward for each seed would be slow: the seeds stand beside each other as rows
    wide = Inputs(
        x.hidden.detach().repeat(count, 1).requires_grad_(),
        x.weight, x.target.repeat(count), x.dlogp.repeat(count),
    )  # fmt: skip
    exact = gradients(x)["dhidden"].double()
    got = gradients(wide, backward=sparse(tolerance=5e-2), backend=backend)["dhidden"]
    errors = got.double().view(count, *exact.shape) - exact
    single = errors.norm(dim=(1, 2)).mean()
    assert single > 20 * 1e-6 * exact.norm()  # there is something to average out
    assert errors.mean(0).norm() < 5 * single / math.sqrt(count)


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
    assert 0 < some["backward_error"] < 4e-3 and some["backward_error_bound"] > 0
    assert 1 <= some["backward_entries"] < SLOTS and 0 <= some["backward_whole_rows"] < 0.5


@pytest.mark.parametrize("exact_weight", (False, True))
@pytest.mark.parametrize("entropy_coef", (0.02, 5.0), ids=["small", "large"])
@pytest.mark.parametrize(
    "backend,dtype",
    [("chunked", torch.float64), ("cpu", torch.float32), ("cpu", torch.bfloat16)],
    ids=str,
)
def test_an_entropy_bonus(
    backend: str, dtype: torch.dtype, entropy_coef: float, exact_weight: bool
) -> None:
    """Its share of the gradient is sampled along, in proportion to its size."""
    config, backward = LossConfig(entropy_coef=entropy_coef), sparse(exact_weight=exact_weight)
    for kind in SIZES:
        found = [
            _loss_gradients(inputs(kind).to(each), config, backend=name, backward=way)
            for each, name, way in (
                (torch.float64, "reference", "exact"),
                (dtype, backend, backward),
            )
        ]
        (exact, _), (got, metrics) = found
        assert metrics["backward_error"] < backward.tolerance
        for name, value in got.items():
            allowed = 1.3 * backward.tolerance + ROUNDING.get(dtype, 0.0)
            assert frobenius(value, exact[name]) <= allowed, (kind, name)


@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize("slots", (200, 4))
@pytest.mark.parametrize(
    "backend,dtype", [("chunked", torch.float64), ("cpu", torch.float32)], ids=str
)
def test_a_sampling_mask(backend: str, dtype: torch.dtype, slots: int, schedule: str) -> None:
    """All of its ids are kept, and nothing is sampled; a row of more ids than slots is whole."""
    x = inputs("SFT-like")
    logits = x.hidden @ x.weight.t()
    lists = [row.topk(1 + 7 * (t % 20)).indices.tolist() for t, row in enumerate(logits)]
    mask = SamplingMask.from_lists(lists)
    found = [
        _loss_gradients(x.to(each), LossConfig(), backend=name, backward=way, mask=mask, **more)
        for each, name, way, more in (
            (torch.float64, "reference", "exact", {}),
            (dtype, backend, sparse(slots=slots), {"schedule": schedule}),
        )
    ]
    (exact, _), (got, metrics) = found
    assert metrics["backward_error"] == 0 == metrics["backward_error_bound"]
    whole = metrics["backward_whole_rows"]
    assert whole == 0 if slots == 200 else 0.8 < whole < 1
    for name, value in got.items():
        assert frobenius(value, exact[name]) <= 3e-6, name


def _loss_gradients(
    x: Inputs, config: LossConfig, mask: SamplingMask | None = None, **options: Any
) -> tuple[dict[str, Tensor], Any]:
    """Return the gradients of a loss of eight sequences, and its metrics."""
    batch = TokenBatch.from_padded(
        x.target.view(8, -1), torch.linspace(-1, 1.5, 8), sampling_mask=mask
    )
    out = linear_policy_loss(x.hidden.view(8, -1, DEPTH), x.weight, batch, config, **options)
    leaves = {"dhidden": x.hidden, "dweight": x.weight}
    found = torch.autograd.grad(out.loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)), out.metrics
