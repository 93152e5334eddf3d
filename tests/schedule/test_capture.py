"""A step that is captured once and replayed: the host decides nothing from values.

On a GPU it is captured and replayed. Elsewhere the operations of a step are written down, with
their shapes, for two batches of the same lengths: a replay is right if they are the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from grpo_kernels import LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.testing import Problem, make_problem
from tests.support.host_reads import OURS, counted_reads

SCHEDULES = ("one_pass", "two_pass")
LOSSES = ("dapo", "gspo", "vespo", "cispo")


def posed(seed: int, device: str, dtype: torch.dtype = torch.float32) -> Problem:
    """Return problems that differ in all values, but not in the lengths."""
    problem = make_problem(4, 9, seed=seed).to(device, dtype)
    problem.mask.copy_(make_problem(4, 9, seed=0).mask)
    return problem


def batch_of(problem: Problem) -> TokenBatch:
    """Make a batch without a transfer: lengths are given, what may change is a tensor."""
    lengths = tuple(problem.mask.sum(1).tolist())
    items = torch.full((), 17.0, device=problem.target.device) * problem.advantages[0].exp()
    return problem.batch(lengths=lengths, num_items_in_batch=items)


def config_for(name: str) -> LossConfig:
    bounds = {"cispo": {"epsilon_high": 5.0}, "vespo": {}}.get(name, {"epsilon": 0.01})
    return LossConfig(loss_type=name, rollout_correction_mode="token_truncate", **bounds)


def step(problem: Problem, batch: TokenBatch, name: str, schedule: str) -> Tensor:
    out = linear_policy_loss(
        problem.hidden, problem.weight, batch, config_for(name), bias=problem.bias,
        schedule=schedule, max_workspace_bytes=53 * 4 * 8,
    )  # fmt: skip
    out.loss.backward()
    return out.loss.detach()


class Written(TorchDispatchMode):
    """The operations within it, with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in OURS:
            with self:
                return OURS[func](*args, **kwargs)
        what = tree_map_only(Tensor, lambda x: tuple(x.shape), (args, kwargs))
        self.operations.append(f"{func} {what}")
        return func(*args, **kwargs)


def written(run: Callable[[], object]) -> list[str]:
    mode = Written()
    with mode:
        run()
    return mode.operations


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_the_same_for_all_values(
    monkeypatch: pytest.MonkeyPatch, name: str, schedule: str
) -> None:
    first, second = posed(0, "cpu"), posed(1, "cpu")
    with counted_reads(monkeypatch) as reads:  # tensors count as a GPU's
        batches = [batch_of(problem) for problem in (first, second)]
        before = list(reads)  # of the tests' own lengths
        steps = [
            written(lambda p=problem, b=batch: step(p, b, name, schedule))
            for problem, batch in zip((first, second), batches, strict=True)
        ]
        assert reads == before
    assert len(steps[0]) > 50 and steps[0] == steps[1]


def copy_values(batch: TokenBatch, other: TokenBatch) -> None:
    """Copy what is on the GPU, as docs/guides/exactness.md says."""
    for field in fields(batch):
        mine, new = getattr(batch, field.name), getattr(other, field.name)
        if isinstance(mine, Tensor) and mine.is_cuda:
            mine.copy_(new)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_replayed_graph_gives_the_bits_of_eager(
    name: str, schedule: str, dtype: torch.dtype
) -> None:
    static = posed(0, "cuda", dtype)
    batch = batch_of(static)
    leaves = (static.hidden, static.weight, static.bias)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled, workspaces made
            step(static, batch, name, schedule)
    torch.cuda.current_stream().wait_stream(stream)
    for leaf in leaves:
        leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(static, batch, name, schedule)
    for seed in (1, 2):
        other = posed(seed, "cuda", dtype)
        with torch.no_grad():
            for mine, new in zip(leaves, (other.hidden, other.weight, other.bias), strict=True):
                mine.copy_(new)
        new_batch = batch_of(other)
        copy_values(batch, new_batch)
        graph.replay()
        expected = step(other, new_batch, name, schedule)
        assert torch.equal(loss, expected)
        for mine, new in zip(leaves, (other.hidden, other.weight, other.bias), strict=True):
            assert torch.equal(mine.grad, new.grad)
