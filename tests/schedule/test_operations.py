"""How many operations a step costs the host; each costs a launch on a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from grpo_kernels import LossConfig, TokenBatch, linear_logprobs, linear_policy_loss
from grpo_kernels.testing import make_problem

# these start no work on a device
FREE = ("view", "slice", "select", "expand", "detach", "alias", "as_strided", "unsqueeze")
FREE += ("squeeze", "t", "split", "unbind", "empty", "new_empty", "empty_like", "set_")
FREE += ("_unsafe_view", "lift_fresh")
FREE += ("zero_", "_local_scalar_dense")  # of a CPU's GEMMs, and of numbers that lie there


class Operations(TorchDispatchMode):
    """Counts what reaches torch's dispatcher, and which of it would start work on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.launches = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.launches += func._schema.name.removeprefix("aten::") not in FREE
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
    assert loss.count <= 155


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter is off")
@pytest.mark.parametrize("loss_type,most", [("dapo", 40), ("cispo", 40), ("grpo", 48)])
def test_a_step_on_a_gpu_launches_few_kernels(
    loss_type: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Count a batch, its loss and its backward, with a scaled loss and unread metrics."""
    interpreter = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    problem = make_problem(4, 8, 16, 67).to("cpu", torch.bfloat16)
    advantages, old = torch.randn(4), problem.logprobs["old_logprobs"].float()
    launched: list[str] = []

    def run(*args: Any, **options: Any) -> Any:
        launched.append("")
        with _disable_current_modes():  # the interpreter computes with torch operations
            return launch(*args, **options)

    launch = interpreter.run
    monkeypatch.setattr(interpreter, "run", run)
    config, scale = LossConfig(loss_type=loss_type), torch.tensor(2.0)
    for _ in range(2):  # the first one traces the loss
        launched.clear()
        problem.hidden.grad = problem.weight.grad = None
        with Operations() as step:
            mask = problem.mask
            batch = TokenBatch.from_padded(problem.target, advantages, mask, old_logprobs=old)
            inputs = (problem.hidden, problem.weight, batch, config)
            (linear_policy_loss(*inputs, backend="triton").loss * scale).backward()
    gemms_outside_of_torch = 2  # of a 16-bit tile and of dhidden: a CPU's are MKL's
    assert 3 <= len(launched) <= 6
    assert step.launches + len(launched) + gemms_outside_of_torch <= most


def test_metrics_cost_nothing_until_they_are_read() -> None:
    problem = make_problem(dtype=torch.float32)
    out = linear_policy_loss(problem.hidden, problem.weight, problem.batch(), LossConfig(beta=0.1))
    with Operations() as first:
        dict(out.metrics)
    with Operations() as second:
        dict(out.metrics)
    assert first.count > second.count > 0


def test_no_wide_copy_of_the_weight_gradient() -> None:
    """Of many slices and one range of rows, each is written to the result at once."""
    seen = set()

    class Outputs(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.update((x.dtype, x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    x = make_problem(1, 13, vocab_size=40_000).to("cpu", torch.bfloat16)
    out = linear_logprobs(x.hidden, x.weight, x.target, backend="chunked")
    with Outputs():
        torch.autograd.grad(out.logprobs.sum(), (x.hidden, x.weight))
    assert (torch.bfloat16, x.weight.shape) in seen
    assert (torch.float32, x.weight.shape) not in seen
