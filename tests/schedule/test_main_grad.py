"""The weight's gradient in a buffer of the caller's: values, repeats, and what is not allocated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels import FusedLinearGRPOLoss, LossConfig, linear_policy_loss
from grpo_kernels.testing import (
    Problem,
    make_problem,
    poisoned_allocations,
    relative_error,
    run,
)
from tests.support.lora_problems import largest_allocation
from tests.support.targets import targets

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
SCHEDULES = ("one_pass", "two_pass")
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}
CONFIG = LossConfig(
    loss_type="dapo", beta=0.05, temperature=0.8, rollout_correction_mode="token_truncate"
)


def loss_of(problem: Problem, config: LossConfig = CONFIG, **options: object) -> Tensor:
    batch = problem.batch(num_items_in_batch=17.0, gradient_accumulation_steps=2)
    arguments = (problem.hidden, problem.weight, batch, config)
    return linear_policy_loss(*arguments, bias=problem.bias, **options).loss  # type: ignore[arg-type]


def buffer_for(problem: Problem) -> Tensor:
    wide = torch.float64 if problem.weight.dtype == torch.float64 else torch.float32
    return torch.full(problem.weight.shape, 0.25, dtype=wide, device=problem.weight.device)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("tile", (None, TILE))
@pytest.mark.parametrize("told", (False, True))
def test_equals_autograd(
    dtype: torch.dtype, schedule: str, backend: str, device: torch.device, tile: int, told: bool
) -> None:
    if dtype == torch.float64 and backend != "chunked":
        pytest.skip("no fp64 there")
    scale = 512.0
    exact = run(make_problem(), CONFIG, scale=scale, backend="reference")
    problem = make_problem().to(device, dtype)
    options = dict(schedule=schedule, backend=backend, max_workspace_bytes=tile)
    plain = run(make_problem().to(device, dtype), CONFIG, scale=scale, **options)
    buffer = buffer_for(problem)
    options["gradient_scale"] = scale if told else None
    with poisoned_allocations():
        got = run(problem, CONFIG, scale=scale, main_grad=buffer, **options)
    assert "dweight" not in got
    for name in ("dhidden", "dbias"):
        assert torch.equal(got[name], plain[name]), name
    assert relative_error(buffer - 0.25, exact["dweight"]) < ROUNDING[dtype]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("told", (False, True))
def test_accumulates_over_micro_batches_into_grad(schedule: str, told: bool) -> None:
    ours, theirs = (make_problem().to("cpu", torch.float32) for _ in range(2))
    ours.weight.grad = torch.zeros_like(ours.weight)
    place = ours.weight.grad
    for config in (CONFIG, LossConfig(loss_type="gspo")):
        scale = 1.0 if told else None
        options = dict(schedule=schedule, main_grad=ours.weight.grad, gradient_scale=scale)
        loss_of(ours, config, **options).backward()
        loss_of(theirs, config, schedule=schedule).backward()
    assert ours.weight.grad is place
    assert relative_error(place, theirs.weight.grad) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("told", (False, True))
def test_every_backward_adds(schedule: str, told: bool) -> None:
    problem = make_problem().to("cpu", torch.float32)
    once = run(make_problem().to("cpu", torch.float32), CONFIG)["dweight"]
    buffer = torch.zeros_like(problem.weight)
    scale = 1.0 if told else None
    loss = loss_of(problem, schedule=schedule, main_grad=buffer, gradient_scale=scale)
    # told its scale, one_pass has added before the backward
    assert bool(buffer.any()) == (told and schedule == "one_pass")
    for times in (1, 2, 3):
        loss.backward(retain_graph=True)
        assert relative_error(buffer, once * times) < 1e-6
    if not told:
        (loss * -3).backward()
        assert buffer.abs().amax() < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_grad_nothing_is_written(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    buffer = buffer_for(problem)
    with torch.no_grad():
        loss_of(problem, schedule=schedule, main_grad=buffer, gradient_scale=1.0)
    assert (buffer == 0.25).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("told", (False, True))
def test_weight_alone_needs_a_gradient(schedule: str, told: bool) -> None:
    problem = make_problem().to("cpu", torch.float32)
    expected = run(make_problem().to("cpu", torch.float32), CONFIG)["dweight"]
    for leaf in (problem.hidden, problem.bias):
        leaf.requires_grad_(False)
    buffer = torch.zeros_like(problem.weight)
    scale = 1.0 if told else None
    loss_of(problem, schedule=schedule, main_grad=buffer, gradient_scale=scale).backward()
    assert relative_error(buffer, expected) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("told", (False, True))
def test_tied_embedding(schedule: str, told: bool) -> None:
    """The embedding's share comes by autograd, the head's by the buffer, into one ``grad``."""
    tokens = torch.randint(0, 53, (4, 7))
    batch = make_problem().batch()

    def step(weight: Tensor, **options: object) -> None:
        hidden = torch.nn.functional.embedding(tokens, weight).tanh()
        linear_policy_loss(
            hidden, weight, batch, CONFIG, schedule=schedule, **options
        ).loss.backward()  # type: ignore[arg-type]

    plain = torch.randn(53, 16, requires_grad=True)
    tied = plain.detach().clone().requires_grad_()
    tied.grad = torch.zeros_like(tied)
    for _ in range(2):
        step(plain)
        step(tied, main_grad=tied.grad, gradient_scale=1.0 if told else None)
    assert relative_error(tied.grad, plain.grad) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("told", (False, True))
def test_autocast_and_skipped_rows(schedule: str, told: bool) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    advantages = problem.advantages.clone()
    advantages[1] = 0
    batch, config = problem.batch(advantages=advantages), LossConfig(epsilon=0.01)
    arguments = (problem.hidden, problem.weight, batch, config)
    buffer, scale = torch.zeros_like(problem.weight), 1.0 if told else None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = linear_policy_loss(*arguments, schedule=schedule).loss
        ours = linear_policy_loss(
            *arguments, schedule=schedule, main_grad=buffer, gradient_scale=scale
        ).loss
    plain.backward()
    expected, problem.weight.grad = problem.weight.grad, None
    ours.backward()
    assert problem.weight.grad is None
    assert relative_error(buffer, expected) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_factor_than_told(monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    options = dict(schedule=schedule, main_grad=buffer_for(problem), gradient_scale=1024.0)
    with pytest.raises(ValueError, match=r"gradient_scale: the loss was .* factor than 1024.0"):
        (loss_of(problem, **options) * 8).backward()
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)
    with pytest.raises(RuntimeError, match="gradient_scale: the loss was differentiated"):
        (loss_of(problem, **options) * 8).backward()
    third = 1024 / 3  # rounded on its way through fp32
    loss = loss_of(problem, **{**options, "gradient_scale": third})
    (loss * 1024 / 3).backward()


def test_module() -> None:
    problem = make_problem().to("cpu", torch.float32)
    buffer = torch.zeros_like(problem.weight)
    module = FusedLinearGRPOLoss(loss_type="dapo", metric_rows="active")
    arguments = (problem.hidden, problem.weight, problem.target, problem.advantages, problem.mask)
    module(*arguments, **problem.logprobs).loss.backward()
    module(*arguments, **problem.logprobs, main_grad=buffer, gradient_scale=1.0).loss.backward()
    assert relative_error(buffer, problem.weight.grad) < 1e-6


WIDE = torch.zeros(53, 16)
BAD: list[tuple[Callable[[Problem], dict], str]] = [
    (lambda p: dict(main_grad=1.0), "main_grad: expected a tensor, got float"),
    (lambda p: dict(main_grad=WIDE.bfloat16()), "main_grad: expected dtype torch.float32"),
    (lambda p: dict(main_grad=WIDE[:9]), r"main_grad: expected a contiguous .* \(53, 16\)"),
    (lambda p: dict(main_grad=torch.zeros(16, 53).t()), "main_grad: .* a non-contiguous one"),
    (lambda p: dict(main_grad=WIDE.to("meta")), "main_grad: expected device cpu, got meta"),
    (lambda p: dict(main_grad=p.weight), "main_grad: expected a tensor that needs no gradient"),
    (lambda p: dict(main_grad=p.weight.detach()), "main_grad: expected a buffer of its own"),
    (lambda p: dict(gradient_scale=1.0), "gradient_scale: expected None without main_grad"),
    (lambda p: dict(main_grad=WIDE, gradient_scale=float("inf")), "gradient_scale: .* finite"),
    (lambda p: dict(main_grad=WIDE, gradient_scale=WIDE[0, 0]), "gradient_scale: .* finite"),
    (lambda p: dict(main_grad=WIDE, backend="reference"), "main_grad: .* eager reference"),
]


@pytest.mark.parametrize("options,message", BAD, ids=[message for _, message in BAD])
def test_bad_arguments(options: Callable[[Problem], dict], message: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    with pytest.raises(ValueError, match=message):
        loss_of(problem, **options(problem))


def test_inside_one_compiled_graph() -> None:
    """Without fullgraph the compiler leaves the call to eager mode."""
    problem, batch, buffer = make_problem().to("cpu", torch.float32), make_problem().batch(), WIDE

    @torch.compile(backend="eager", fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(hidden, weight, batch, CONFIG, main_grad=buffer).loss

    with pytest.raises(Exception, match="main_grad: expected None inside torch.compile"):
        loss(problem.hidden, problem.weight)


def test_frozen_weight_takes_no_buffer() -> None:
    problem = make_problem().to("cpu", torch.float32)
    problem.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="main_grad: expected None for a weight that needs no"):
        loss_of(problem, main_grad=WIDE)


# --- memory


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    "schedule,told", [("two_pass", False), ("two_pass", True), ("one_pass", True)]
)
@pytest.mark.parametrize("given", (True, False))
def test_no_second_tensor_of_the_size_of_the_weight(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, schedule: str, told: bool, given: bool
) -> None:
    from grpo_kernels.engine import gradients, recompute
    from grpo_kernels.head import matmul

    columns, depth = 4096, 32
    for module in (matmul, gradients):  # slices of a GEMM that are small beside the whole
        monkeypatch.setattr(module, "SLICE_COLUMNS", 512)
    for name in ("_MIN_COLUMNS", "_MAX_COLUMNS"):
        monkeypatch.setattr(recompute, name, 512)
    problem = make_problem(2, 4, depth, columns).to("cpu", dtype)
    buffer = torch.zeros(columns, depth) if given else None
    options = dict(schedule=schedule, main_grad=buffer, max_workspace_bytes=columns * 4 * 3)
    options["gradient_scale"] = 1.0 if told and given else None
    with largest_allocation() as seen:
        loss_of(problem, **options).backward()
    assert (seen.elements < columns * depth) == given
