"""What a loss refuses, by the argument's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels.batch.host as host
from grpo_kernels import LossConfig, SamplingMask, TokenBatch, linear_policy_loss
from grpo_kernels.testing import Problem, make_problem, run
from tests.support.lora_problems import lora_problem

WIDE, LORA, ONES = torch.zeros(53, 16), lora_problem(rank=2).lora, torch.ones(4, 7)
BUFFERS: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "main_grad: expected a tensor, got float": lambda p: dict(main_grad=1.0),
    "main_grad: expected dtype torch.float32": lambda p: dict(main_grad=WIDE.bfloat16()),
    r"main_grad: expected a contiguous .* \(53, 16\)": lambda p: dict(main_grad=WIDE[:9]),
    "main_grad: .* a non-contiguous one": lambda p: dict(main_grad=torch.zeros(16, 53).t()),
    "main_grad: expected device cpu, got meta": lambda p: dict(main_grad=WIDE.to("meta")),
    "main_grad: expected a tensor that needs no": lambda p: dict(main_grad=p.weight),
    "main_grad: expected a buffer of its own": lambda p: dict(main_grad=p.weight.detach()),
    "main_grad: expected None for a weight": lambda p: dict(
        main_grad=WIDE, weight=p.weight.detach()
    ),
    "main_grad: .* eager reference": lambda p: dict(main_grad=WIDE, backend="reference"),
    "gradient_scale: expected None without": lambda p: dict(gradient_scale=1.0),
    "gradient_scale: .* finite float, got inf": lambda p: dict(
        main_grad=WIDE, gradient_scale=float("inf")
    ),
    "gradient_scale: .* finite float, got tensor": lambda p: dict(
        main_grad=WIDE, gradient_scale=WIDE[0, 0]
    ),
}
OPTIONS = BUFFERS | {
    r"lora\.a: expected": lambda p: dict(lora=replace(LORA, a=LORA.a[:, 1:])),
    r"lora\.b: expected": lambda p: dict(lora=replace(LORA, b=LORA.b[1:])),
    r"lora\.scaling: expected": lambda p: dict(lora=replace(LORA, scaling=float("inf"))),
    "metric_rows: expected one of all, active": lambda p: dict(metric_rows="none"),
    "metric_rows: expected 'all' for a loss whose gate": lambda p: dict(
        metric_rows="active", config=LossConfig(top_entropy_quantile=0.5)
    ),
    "rollout_correction_mode: vespo .* 'token_mask'": lambda p: dict(
        config=LossConfig(loss_type="vespo")
    ),
    "rollout_weights: expected None where rollout_correction": lambda p: dict(
        config=LossConfig(rollout_correction_mode="token_mask"), batch=dict(rollout_weights=ONES)
    ),
    "rollout_weights: expected finite values >= 0": lambda p: dict(
        batch=dict(rollout_weights=ONES * torch.nan)
    ),
    "rollout_weights: expected finite values >= 0 on valid": lambda p: dict(
        batch=dict(rollout_weights=-ONES)
    ),
    "sampling_mask: expected a SamplingMask of 28 rows .* got list": lambda p: dict(
        batch=dict(sampling_mask=[[1]])
    ),
    "sampling_mask: expected a SamplingMask of 28 rows .* got 9 rows": lambda p: dict(
        batch=dict(sampling_mask=SamplingMask.from_lists([[1]] * 9))
    ),
    r"sampling_mask: expected ids in \[0, 53\), got 99": lambda p: dict(
        batch=dict(sampling_mask=SamplingMask.from_lists([[99]] * 28))
    ),
}


@pytest.mark.parametrize("message", OPTIONS)
def test_it_is_named(message: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    options = dict(OPTIONS[message](problem))
    config, fields = options.pop("config", LossConfig()), options.pop("batch", {})
    before = problem.weight.clone()
    with pytest.raises(ValueError, match=message):
        run(problem, config, problem.batch(**fields), **options)
    assert torch.equal(problem.weight, before) and not WIDE.any()


def test_a_buffer_inside_one_compiled_graph() -> None:
    """Without fullgraph the compiler leaves the call to eager mode."""
    problem, config = make_problem().to("cpu", torch.float32), LossConfig()
    batch, buffer = problem.batch(), WIDE

    @torch.compile(backend="eager", fullgraph=True)
    def loss(hidden: Tensor, weight: Tensor) -> Tensor:
        return linear_policy_loss(hidden, weight, batch, config, main_grad=buffer).loss

    with pytest.raises(Exception, match="main_grad: expected None inside torch.compile"):
        loss(problem.hidden, problem.weight)


MASK = torch.tensor([[True, True, False], [True, False, False]])
COUNTS: dict[str, dict[str, Any]] = {
    r"lengths: expected \(2, 1\) for these tensors, got \(2, 2\)": dict(lengths=[2, 2]),
    "lengths: expected 2 ints >= 0, one per sequence": dict(lengths=[2]),
    "lengths: expected 2 ints >= 0, .* -1": dict(lengths=[2, -1]),
    "lengths: expected 2 ints >= 0, .* tensor": dict(lengths=torch.tensor([2, 1])),
    "lengths: expected the valid tokens that active_lengths are of": dict(active_lengths=[2, 1]),
    r"active_lengths: expected \(2, 0\)": dict(lengths=[2, 1], active_lengths=[0, 1]),
    "active_lengths: expected at most": dict(lengths=[2, 1], active_lengths=[2, 2]),
}


@pytest.mark.parametrize("message", COUNTS)
def test_wrong_counts(message: str) -> None:
    advantages = torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match=message):
        TokenBatch.from_padded(torch.ones(2, 3).long(), advantages, MASK, **COUNTS[message])


@pytest.mark.parametrize(
    "target,advantages,counts,message",
    [
        (1, 1.0, [2, 2], "lengths: expected another sum"),
        (1, float("nan"), [2, 1], "finite values"),
        (-7, 1.0, [2, 1], "target: expected ids >= 0"),
        (99, 1.0, [2, 1], r"target: expected ids in \[0, 53\)"),
    ],
)
def test_with_counts_values_are_checked_on_the_device(
    monkeypatch: pytest.MonkeyPatch, target: int, advantages: float, counts: list, message: str
) -> None:
    monkeypatch.setattr(host, "reading_is_free", lambda x: False)

    def step() -> None:
        ids, each = torch.full((2, 3), target), torch.full((2,), advantages)
        batch = TokenBatch.from_padded(ids, each, MASK, lengths=counts)
        linear_policy_loss(torch.ones(2, 3, 4), torch.ones(53, 4), batch, LossConfig())

    with pytest.raises(RuntimeError, match=message):
        step()
