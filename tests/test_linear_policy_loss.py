"""linear_policy_loss: what ``tests/net`` does not generate: compiled backends, plans, digits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    linear_policy_loss,
)
from grpo_kernels.losses import LOSSES
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_config,
    make_problem,
    poisoned_allocations,
    relative_error,
    run,
)
from tests.support.targets import targets

COMPILED = (
    pytest.param(torch.float32, {"beta": 0.05, "entropy_coef": 0.01}, "one_pass", id="float32"),
    pytest.param(torch.bfloat16, {}, "one_pass", id="bfloat16"),
    pytest.param(torch.float16, {"beta": 0.05}, "two_pass", id="float16"),
)
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def assert_exact(
    problem: Problem,
    config: LossConfig,
    device: torch.device,
    dtype: torch.dtype,
    floor: float | None = None,
    **options: Any,
) -> None:
    exact = run(problem, config, backend="reference")
    eager = run(problem.to(device, dtype), config, backend="reference")
    with poisoned_allocations():
        got = run(problem.to(device, dtype), config, **options)
    assert_all_as_exact_as(got, eager, exact, floor or FLOOR[dtype])


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype,settings,schedule", COMPILED)
@pytest.mark.parametrize("backend,device", targets("cpu", "chunked"))
def test_every_loss_on_a_gpu_and_in_triton(
    name: str, dtype: torch.dtype, settings: dict, schedule: str, backend: str, device: torch.device
) -> None:
    problem = make_problem(3, 4, vocab_size=21)
    config = make_config(name, temperature=0.8, **settings)
    assert_exact(problem, config, device, dtype, backend=backend, schedule=schedule)


@pytest.mark.parametrize("name", ("gspo", "gmpo", "vespo"))
@pytest.mark.parametrize("share,schedule", ((0.4, "two_pass"), (1.6, "one_pass")))
@pytest.mark.parametrize("backend,device", targets("cpu", "chunked"))
def test_a_long_sequence_on_a_gpu_and_in_triton(
    name: str, share: float, schedule: str, backend: str, device: torch.device
) -> None:
    long = 65600 if device.type == "cuda" else 20  # past the second axis of a GPU's grid
    problem = make_problem(4, long, 4, 11)
    problem.mask.copy_(torch.arange(long) < torch.tensor([5, long, 0, 1])[:, None])
    options = dict(backend=backend, max_workspace_bytes=int(share * long) * 11 * 4)
    config = make_config(name, beta=0.05)
    floor = 8e-6  # of sums over so many rows, most of which cancel
    assert_exact(problem, config, device, torch.float32, floor, schedule=schedule, **options)


@pytest.mark.parametrize("vocab_size", (262_144, 262_145, 262_208))  # Gemma 3 1B, an odd one, 4B
@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("backend,device", targets("triton"))  # minutes in the interpreter
def test_a_large_vocabulary(
    dtype: torch.dtype, schedule: str, vocab_size: int, backend: str, device: torch.device
) -> None:
    """In two chunks, the first and the last id among the targets."""
    problem = make_problem(2, 7, 24, vocab_size)
    problem.mask.fill_(True)
    problem.target[:, 0], problem.target[:, 1] = 0, vocab_size - 1
    config = make_config("dapo", beta=0.05)
    options = dict(backend=backend, max_workspace_bytes=8 * vocab_size * 4)
    assert_exact(problem, config, device, dtype, schedule=schedule, **options)


def run_part(part: str, posed: Problem, **options: Any) -> dict[str, Tensor]:
    """Run a loss whose batch or head has one more part."""
    fields: dict[str, Any] = {}
    leaves = {"hidden": posed.hidden, "weight": posed.weight}
    if part == "lora":
        steps = torch.arange(2 * 21).remainder(7).to(posed.weight) / 8 - 0.375
        leaves |= {"a": steps[:32].view(2, 16).clone(), "b": steps.view(21, 2).clone()}
        a, b = (leaves[name].requires_grad_() for name in "ab")
        options["lora"] = HeadLoRA(a=a, b=b, scaling=0.5)
    elif part == "sampling_mask":
        ids = (posed.target[..., None] + torch.arange(0, 18, 2, device=posed.target.device)) % 21
        fields["sampling_mask"] = SamplingMask.from_padded(ids)
    elif part == "rollout_weights":
        fields = dict(rollout_logprobs=None, rollout_weights=posed.mask * 0.75 + 0.5)
    elif part == "main_grad" and options["backend"] != "reference":
        options["main_grad"] = torch.zeros_like(posed.weight, dtype=torch.float32)
    config = make_config("dapo", epsilon=0.01)  # clips about half of the tokens
    found = run(posed, config, posed.batch(**fields), leaves=leaves, **options)
    buffer = options.get("main_grad")
    return dict(found) if buffer is None else {**found, "dweight": buffer}


@pytest.mark.parametrize("part", ("lora", "sampling_mask", "rollout_weights", "main_grad"))
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize("backend,device", targets("cpu", "chunked"))
def test_parts_of_a_loss_on_a_gpu_and_in_triton(
    part: str, dtype: torch.dtype, schedule: str, backend: str, device: torch.device
) -> None:
    problem = make_problem(3, 4, vocab_size=21)
    exact = run_part(part, problem, backend="reference")
    eager = run_part(part, problem.to(device, dtype), backend="reference")
    with poisoned_allocations():
        got = run_part(part, problem.to(device, dtype), backend=backend, schedule=schedule)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype])


@pytest.mark.parametrize(
    "schedule,changed",
    [
        ("one_pass", "target"),
        ("one_pass", "advantages"),
        ("one_pass", "old_logprobs"),
        ("two_pass", "target"),
    ],
)
def test_a_batch_changed_before_a_recompute_is_refused(schedule: str, changed: str) -> None:
    problem = make_problem(dtype=torch.float32)
    batch = problem.batch()
    out = linear_policy_loss(
        problem.hidden, problem.weight, batch, make_config("dapo"), schedule=schedule
    )
    out.loss.backward(retain_graph=True)
    getattr(batch, changed).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_fp16_gradients_survive_a_tiny_loss() -> None:
    """Weights of 1e-6 would underflow as fp16 logit gradients; GradScaler comes after the op."""
    problem = make_problem()
    config = make_config("dapo")
    tiny = problem.batch(num_items_in_batch=1e6)
    scale = 2.0**20

    exact = run(problem, config, tiny, scale=scale, backend="reference")
    for schedule in ("one_pass", "two_pass"):
        half = problem.to("cpu", torch.float16)
        got = run(half, config, tiny, scale=scale, schedule=schedule)
        for name in ("dhidden", "dweight", "dbias"):
            assert relative_error(got[name], exact[name]) < 2e-3, name


def test_a_metric_that_is_not_there_is_answered_by_those_that_are() -> None:
    batch = TokenBatch.from_padded(torch.tensor([[1, 2]]), torch.ones(1))
    hidden, weight = torch.randn(1, 2, 4), torch.randn(9, 4)
    metrics = linear_policy_loss(hidden, weight, batch, LossConfig()).metrics
    with pytest.raises(KeyError, match=r"clipped: expected one of entropy, .*clip_ratio/"):
        metrics["clipped"]
