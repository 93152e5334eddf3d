"""The loss where training puts it: checkpointing, autocast, GradScaler, DDP, repeated backwards.

And where it does not belong: second derivatives and torch.func say so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from grpo_kernels import LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
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
@pytest.mark.parametrize("autocast", (False, True))
def test_model_and_loss_inside_a_checkpoint(
    schedule: str, use_reentrant: bool, autocast: bool
) -> None:
    """The recomputation runs under the autocast of the forward."""
    model = Model(schedule)
    x, batch = posed()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(x, batch).backward()
        gradients = model.gradients()
        loss = checkpoint(model, x.requires_grad_(), batch, use_reentrant=use_reentrant)
    loss.backward()
    assert_equal(model.gradients(), gradients, rtol=0, atol=0)
    assert x.grad is not None


@both
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(schedule: str, dtype: torch.dtype, device: str) -> None:
    model, gradients = expected(schedule, device)
    with torch.autocast(device, dtype=dtype):
        loss = model(*posed(device))
    loss.backward()
    for value, exact in zip(model.gradients(), gradients, strict=True):
        assert value.dtype == torch.float32
        assert relative_error(value, exact) < 0.05


@both
@pytest.mark.parametrize("device", DEVICES)
def test_grad_scaler(schedule: str, device: str) -> None:
    """fp16 autocast: gradients come back unscaled, and a step that overflows is left out."""
    model, gradients = expected(schedule, device)
    x, batch = posed(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=1)
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x, batch)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    got = [parameter.grad.clone() for parameter in model.parameters()]
    for value, exact in zip(got, gradients, strict=True):
        assert relative_error(value, exact) < 0.02
    before = model.head.weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(model.head.weight, before) and scaler.get_scale() == 2.0**17

    optimizer.zero_grad()
    before = model.head.weight.detach().clone()
    overflowing = torch.full((), 1e38, device=device)
    with torch.autocast(device, dtype=torch.float16):
        loss = model(x, batch)
    scaler.scale(loss * overflowing).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.head.weight, before) and scaler.get_scale() == 2.0**16


@both
def test_gradients_add_to_those_that_are_there(schedule: str) -> None:
    model, gradients = expected(schedule)
    x, batch = posed()
    for _ in range(3):
        (model(x, batch) / 2).backward()
    assert_equal(model.gradients(), [1.5 * x for x in gradients])


@both
def test_one_backward_for_two_losses(schedule: str) -> None:
    model, gradients = expected(schedule)
    x, batch = posed()
    (model(x, batch) + 2 * model(x, batch)).backward()
    assert_equal(model.gradients(), [3 * x for x in gradients])


@both
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_no_graph_no_gradients(schedule: str, mode: Callable) -> None:
    model, _ = expected(schedule)
    loss = model(*posed())
    with mode():
        other = model(*posed())
    assert not other.requires_grad
    torch.testing.assert_close(other, loss.detach())


@both
@pytest.mark.parametrize("wanted", ("hidden", "weight", "bias"))
def test_each_input_alone_gets_its_gradient(schedule: str, wanted: str) -> None:
    problem = make_problem().to("cpu", torch.float32)

    def gradient(*names: str) -> Tensor:
        leaves = {name: getattr(problem, name).detach() for name in ("hidden", "weight", "bias")}
        for name in names:
            leaves[name].requires_grad_()
        out = linear_policy_loss(batch=problem.batch(), config=CONFIG, schedule=schedule, **leaves)
        out.loss.backward()
        assert all((leaf.grad is not None) == (name in names) for name, leaf in leaves.items())
        return leaves[wanted].grad  # type: ignore[return-value]

    torch.testing.assert_close(gradient(wanted), gradient("hidden", "weight", "bias"))


def worker(rank: int, folder: str) -> None:
    """Run half of the sequences; what a token-sum loss divides by is a process's share."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    problem = make_problem().to("cpu", torch.float32)
    mine = slice(2 * rank, 2 * rank + 2)
    logprobs = {name: value[mine] for name, value in problem.logprobs.items()}
    part = Problem(
        problem.hidden[mine], problem.weight, problem.bias, problem.target[mine],
        problem.mask[mine], problem.advantages[mine], logprobs,
    )  # fmt: skip
    batch = part.batch(num_items_in_batch=17.0 / 2)
    for schedule in SCHEDULES:
        model = DistributedDataParallel(Model(schedule))
        for _ in range(2):  # the second fills buckets that are known
            model.zero_grad()
            model(part.hidden.detach(), batch).backward()
        torch.save(model.module.gradients(), f"{folder}/{schedule}{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2)
    for schedule in SCHEDULES:
        _, gradients = expected(schedule)
        for rank in range(2):
            assert_equal(torch.load(tmp_path / f"{schedule}{rank}.pt"), gradients)


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


@KINDS
@pytest.mark.parametrize("transform", ("grad", "vjp", "jvp", "vmap", "jacrev", "hessian"))
def test_functional_transforms_are_refused(kind: str, transform: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    function, x = scalar(kind, problem), problem.hidden.detach()
    with pytest.raises(ValueError, match=r"hidden: expected a plain tensor, .* torch.func"):
        transformed(transform, function, x)


def transformed(name: str, function: Callable[[Tensor], Tensor], x: Tensor) -> object:
    if name == "jvp":
        return torch.func.jvp(function, (x,), (torch.ones_like(x),))
    if name == "vjp":
        return torch.func.vjp(function, x)
    return getattr(torch.func, name)(function)(torch.stack([x, x]) if name == "vmap" else x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind,transform", (("one_pass", "jvp"), ("two_pass", "grad"), ("logprobs", "vmap"))
)
def test_functional_transforms_are_refused_when_compiled(kind: str, transform: str) -> None:
    torch._dynamo.reset()
    problem = make_problem().to("cpu", torch.float32)
    function, x = scalar(kind, problem), problem.hidden.detach()
    compiled = torch.compile(lambda x: transformed(transform, function, x), backend="aot_eager")
    with pytest.raises(ValueError, match=r"hidden: expected a plain tensor, .* torch.func"):
        compiled(x)


@KINDS
def test_forward_mode_is_refused(kind: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    x = problem.hidden.detach()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ValueError, match=r"hidden: expected .* forward-mode tangent"):
            scalar(kind, problem)(dual)


@both
def test_functional_call(schedule: str) -> None:
    """By itself it is no transform: the loss of a model with other parameters."""
    model, gradients = expected(schedule)
    parameters = {name: value.detach().requires_grad_() for name, value in model.named_parameters()}

    args = posed()

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, args)

    loss(parameters).backward()
    assert_equal([value.grad for value in parameters.values()], gradients)
    head = {"head.weight": model.head.weight.detach()}
    with pytest.raises(ValueError, match="expected a plain tensor"):
        torch.func.grad(loss)(head)
