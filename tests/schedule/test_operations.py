"""How many operations a step costs the host; each costs a launch on a GPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import LossConfig, linear_policy_loss
from grpo_kernels.testing import make_problem


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_step_takes_few_operations() -> None:
    problem = make_problem(4, 8, 16, 67, dtype=torch.float32)
    config = LossConfig(loss_type="dapo")
    with Operations() as batch:
        made = problem.batch(ref_logprobs=None, rollout_logprobs=None)
    with Operations() as loss:
        out = linear_policy_loss(problem.hidden, problem.weight, made, config, backend="chunked")
        out.loss.backward()
    assert batch.count <= 45
    assert loss.count <= 150


def test_metrics_cost_nothing_until_they_are_read() -> None:
    problem = make_problem(dtype=torch.float32)
    out = linear_policy_loss(problem.hidden, problem.weight, problem.batch(), LossConfig(beta=0.1))
    with Operations() as first:
        dict(out.metrics)
    with Operations() as second:
        dict(out.metrics)
    assert first.count > second.count > 0
