"""The loss where training puts it: checkpointing, autocast, GradScaler, sums of losses.

And where it does not belong: second derivatives and torch.func say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from grpo_kernels import LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.backends import RowStats, StatsGrad
from grpo_kernels.schedule import passes
from grpo_kernels.schedule.chunk_loss import chunk_loss
from grpo_kernels.testing import Problem, make_problem, relative_error
from tests.conftest import DEVICES

SCHEDULES = ("one_pass", "two_pass")
CONFIG = LossConfig(loss_type="dapo", beta=0.05, rollout_correction_mode=None)
both = pytest.mark.parametrize("schedule", SCHEDULES)


class Model(nn.Module):
    """A layer, a head, and the loss in the forward."""

    def __init__(self, schedule: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 53)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
        self.schedule = schedule

    def forward(self, x: Tensor, batch: TokenBatch) -> Tensor:
        hidden = self.layer(x).tanh()
        return linear_policy_loss(
            hidden, self.head.weight, batch, CONFIG, bias=self.head.bias, schedule=self.schedule
        ).loss

    def gradients(self) -> list[Tensor]:
        gradients = [parameter.grad for parameter in self.parameters()]
        self.zero_grad()
        return gradients  # type: ignore[return-value]


def posed(device: torch.device | str = "cpu") -> tuple[Tensor, TokenBatch]:
    """Return inputs of a model, and the batch."""
    problem = make_problem().to(device, torch.float32)
    return problem.hidden.detach(), problem.batch(num_items_in_batch=17.0)


def expected(schedule: str, device: torch.device | str = "cpu") -> tuple[Model, list[Tensor]]:
    """Return a model, and the gradients it should have."""
    model = Model(schedule).to(device)
    model(*posed(device)).backward()
    return model, model.gradients()


def assert_equal(got: list[Tensor], other: list[Tensor], **tolerance: float) -> None:
    for value, reference in zip(got, other, strict=True):
        torch.testing.assert_close(value, reference, **tolerance)


@both
@pytest.mark.parametrize("use_reentrant", (False, True))
def test_model_and_loss_inside_a_checkpoint(schedule: str, use_reentrant: bool) -> None:
    """The recomputation runs under the autocast of the forward."""
    model = Model(schedule)
    x, batch = posed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x, batch).backward()
        gradients = model.gradients()
        loss = checkpoint(model, x.requires_grad_(), batch, use_reentrant=use_reentrant)
    loss.backward()
    assert_equal(model.gradients(), gradients, rtol=0, atol=0)
    assert x.grad is not None


def test_a_checkpoint_runs_a_loss_of_many_chunks_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not once more for each chunk, whose loss has a backward of its own."""
    chunks: list[slice] = []

    def counted(stats: RowStats, part: slice, **arguments: Any) -> tuple[Tensor, StatsGrad]:
        chunks.append(part)
        return chunk_loss(stats, part, **arguments)

    monkeypatch.setattr(passes, "chunk_loss", counted)
    problem = make_problem().to("cpu", torch.float32)

    def loss(hidden: Tensor) -> Tensor:
        return linear_policy_loss(
            hidden,
            problem.weight,
            problem.batch(),
            CONFIG,
            backend="chunked",
            schedule="one_pass",
            max_workspace_bytes=4 * len(problem.weight),
        ).loss

    loss(problem.hidden).backward()
    once = len(chunks)
    checkpoint(loss, problem.hidden, use_reentrant=False).backward()
    assert once > 5 and len(chunks) == 3 * once


@both
@pytest.mark.parametrize("device", DEVICES)
def test_grad_scaler(schedule: str, device: str) -> None:
    """fp16 autocast: gradients come back unscaled, and a step that overflows is left out."""
    model, gradients = expected(schedule, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=1)

    def backward(factor: float) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            loss = model(*posed(device))
        scaler.scale(loss * torch.full((), factor, device=device)).backward()
        return model.head.weight.detach().clone()

    before = backward(1.0)
    scaler.unscale_(optimizer)
    for parameter, exact in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad.dtype == torch.float32
        assert relative_error(parameter.grad, exact) < 0.02
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.head.weight, before) and scaler.get_scale() == 2.0**17

    before = backward(1e38)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.head.weight, before) and scaler.get_scale() == 2.0**16


@both
def test_losses_add_up(schedule: str) -> None:
    """Two of them in one backward, others in backwards of their own."""
    model, gradients = expected(schedule)
    x, batch = posed()
    (model(x, batch) + 2 * model(x, batch)).backward()
    (model(x, batch) / 2).backward()
    assert_equal(model.gradients(), [3.5 * x for x in gradients])


def scalar(kind: str, problem: Problem) -> Callable[[Tensor], Tensor]:
    """Return a function of hidden states that runs kernels."""
    batch = problem.batch()

    def loss(hidden: Tensor) -> Tensor:
        return linear_policy_loss(hidden, problem.weight, batch, CONFIG, schedule=kind).loss

    def logprobs(hidden: Tensor) -> Tensor:
        out = linear_logprobs(hidden, problem.weight, problem.target, backend="chunked")
        assert out.logprobs is not None
        return out.logprobs.sum()

    return logprobs if kind == "logprobs" else loss


KINDS = pytest.mark.parametrize("kind", (*SCHEDULES, "logprobs"))


@KINDS
def test_second_derivatives_are_refused(kind: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    hidden = problem.hidden
    (gradient,) = torch.autograd.grad(scalar(kind, problem)(hidden), hidden, create_graph=True)
    assert gradient.abs().sum() > 0  # the first is fine
    message = r"second derivatives are not supported: .* backend='reference' has more"
    # also as part of a sum whose other part has one
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(gradient.square().sum() + hidden.square().sum(), hidden)


def test_the_reference_has_second_derivatives() -> None:
    problem = make_problem(2, 3).to("cpu", torch.float64)
    batch = problem.batch()

    def loss(hidden: Tensor) -> Tensor:
        out = linear_policy_loss(hidden, problem.weight, batch, CONFIG, backend="reference")
        return out.loss

    assert torch.autograd.gradgradcheck(loss, problem.hidden, fast_mode=True)
    of_func = torch.func.grad(loss)(problem.hidden.detach())
    torch.testing.assert_close(
        of_func, torch.autograd.grad(loss(problem.hidden), problem.hidden)[0]
    )


TRANSFORMS: dict[str, Callable[[Callable, Tensor], object]] = {
    "grad": lambda function, x: torch.func.grad(function)(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (x,)),
    "vmap": lambda function, x: torch.func.vmap(function)(torch.stack([x, x])),
}


@KINDS
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_functional_transforms_are_refused(kind: str, transform: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    with pytest.raises(ValueError, match=r"hidden: expected a plain tensor, .* torch.func"):
        TRANSFORMS[transform](scalar(kind, problem), problem.hidden.detach())


@KINDS
def test_forward_mode_is_refused(kind: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    x = problem.hidden.detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match=r"hidden: expected .* forward-mode tangent"):
            scalar(kind, problem)(dual)
