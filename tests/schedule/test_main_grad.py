"""The weight's gradient in a buffer of the caller's: when it is written, and what is not allocated.

Its values are in ``tests/net``.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA, LossConfig, linear_policy_loss
from grpo_kernels.testing import Problem, make_problem, relative_error
from tests.support.memory import Largest

SCHEDULES = ("one_pass", "two_pass")
CONFIG = LossConfig(
    loss_type="dapo", beta=0.05, temperature=0.8, rollout_correction_mode="token_truncate"
)
both = pytest.mark.parametrize("schedule", SCHEDULES)


def loss_of(problem: Problem, config: LossConfig = CONFIG, **options: object) -> Tensor:
    batch = problem.batch(num_items_in_batch=17.0, gradient_accumulation_steps=2)
    arguments = (problem.hidden, problem.weight, batch, config)
    return linear_policy_loss(*arguments, bias=problem.bias, **options).loss  # type: ignore[arg-type]


@both
def test_micro_batches_add_up_in_grad(schedule: str) -> None:
    ours, theirs = (make_problem().to("cpu", torch.float32) for _ in range(2))
    place = ours.weight.grad = torch.zeros_like(ours.weight)
    for config in (CONFIG, LossConfig(loss_type="gspo")):
        loss_of(ours, config, schedule=schedule, main_grad=place).backward()
        loss_of(theirs, config, schedule=schedule).backward()
    assert ours.weight.grad is place
    assert relative_error(place, theirs.weight.grad) < 1e-6


@both
def test_when_the_buffer_is_written(schedule: str) -> None:
    """A backward adds, and nothing else."""
    problem = make_problem().to("cpu", torch.float32)
    buffer = torch.zeros_like(problem.weight)
    options = dict(schedule=schedule, main_grad=buffer)
    with torch.no_grad():
        loss_of(problem, **options)
    assert not buffer.any()
    loss = loss_of(problem, **options)
    assert not buffer.any()
    loss.backward(retain_graph=True)
    once = buffer.clone()
    loss.backward(retain_graph=True)
    assert once.any() and relative_error(buffer, once * 2) < 1e-6


@both
def test_a_bf16_gradient_is_not_rounded_before_it_is_added(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.bfloat16)
    buffer = torch.zeros_like(problem.weight, dtype=torch.float32)
    loss_of(problem, schedule=schedule, main_grad=buffer).backward()
    assert (buffer != buffer.bfloat16()).float().mean() > 0.5


# --- memory


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("given", (True, False))
def test_no_second_tensor_of_the_size_of_the_weight(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, given: bool
) -> None:
    from grpo_kernels.engine import gradients, weight_sum
    from grpo_kernels.head import matmul

    columns, depth = 4096, 32
    for module in (matmul, weight_sum):  # slices of a GEMM that are small beside the whole
        monkeypatch.setattr(module, "SLICE_COLUMNS", 512)
    for name in ("_MIN_COLUMNS", "_MAX_COLUMNS"):
        monkeypatch.setattr(gradients, name, 512)
    problem = make_problem(2, 4, depth, columns).to("cpu", dtype)
    buffer = torch.zeros(columns, depth) if given else None
    options = dict(schedule="two_pass", main_grad=buffer, max_workspace_bytes=columns * 4 * 3)
    with Largest() as seen:
        loss_of(problem, **options).backward()
    assert (seen.elements < columns * depth) == given


@pytest.mark.usefixtures("narrow_slices")
@both
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_none_for_an_adapter_on_a_frozen_base(schedule: str, dtype: torch.dtype) -> None:
    problem = make_problem(sequences=1, length=3, hidden_size=64, vocab_size=999).to("cpu", dtype)
    for x in (problem.weight, problem.bias):
        x.requires_grad_(False)
    a, b = (torch.randn(shape, requires_grad=True) for shape in ((4, 64), (999, 4)))
    with Largest() as seen:
        loss_of(problem, lora=HeadLoRA(a=a, b=b), schedule=schedule).backward()
    assert a.grad is not None and b.grad is not None
    assert 0 < seen.elements < problem.weight.numel() / 2
