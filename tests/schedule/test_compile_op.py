"""Inside torch.compile: one graph, the bits of eager, no recompilation for a new batch.

The parts of a call are in ``tests/net``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from grpo_kernels import (
    LossConfig,
    PolicyLossOutput,
    available_backends,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.losses import Metrics
from grpo_kernels.testing import Problem, make_problem, run

pytestmark = pytest.mark.slow

SCHEDULES = ("one_pass", "two_pass")
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def whole(function: Callable) -> Callable:
    """Compile to one graph, which runs as it is; raise if there would be two."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def loss_of(hidden: Tensor, *args: object, **options: object) -> PolicyLossOutput:
    """Compute the loss of a model, as far as a compiler sees one."""
    return linear_policy_loss(torch.tanh(hidden), *args, **options)  # type: ignore[arg-type]


def assert_same_bits(
    compiled: Callable, eager: Callable, problem: Problem, *args: object, **options: object
) -> dict[str, Tensor]:
    """Check loss, gradients and metrics; the factor is a power of two, which rounds nothing."""
    got, expected = (
        run(problem, *args, scale=2.0, function=function, **options)  # type: ignore[arg-type]
        for function in (compiled, eager)
    )
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype, name
        assert torch.equal(got[name].nan_to_num(), value.nan_to_num()), name
    return got


@pytest.mark.parametrize("schedule,dtype", zip(SCHEDULES, DTYPES, strict=True))
def test_loss_compiled_is_the_eager_one(schedule: str, dtype: torch.dtype) -> None:
    """Other lengths, another loss and another coefficient need no new graph."""
    function = whole(loss_of)
    for length, name in ((7, "dapo"), (9, "gspo"), (5, "sapo"), (7, "vespo")):
        problem = make_problem(length=length).to("cpu", dtype)
        config = LossConfig(loss_type=name, beta=0.01 * length, rollout_correction_mode=None)
        args = (problem, config, problem.batch(num_items_in_batch=17.0 + length))
        assert_same_bits(function, loss_of, *args, schedule=schedule)
    assert graphs() <= (2 if torch.__version__ >= "2.13" else 4)  # older ones compile each loss


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("schedule,name", zip(SCHEDULES, ("gspo", "dapo"), strict=True))
def test_loss_compiled_on_triton(name: str, schedule: str) -> None:
    """A loss with sums over sequences, and one in a generated kernel."""
    problem = make_problem().to("cpu", torch.float32)
    config, batch = LossConfig(loss_type=name), problem.batch(rollout_logprobs=None)
    options = dict(backend="triton", schedule=schedule)
    assert_same_bits(whole(loss_of), loss_of, problem, config, batch, **options)


def test_inductor_compiles_model_and_loss_in_one_graph() -> None:
    problem, layer, head = (
        make_problem().to("cpu", torch.float32),
        nn.Linear(16, 16),
        nn.Linear(16, 53),
    )
    batch, config, x = problem.batch(), LossConfig(), problem.hidden.detach()

    def loss_of_model() -> Tensor:
        return linear_policy_loss(layer(x).tanh(), head.weight, batch, config).loss

    leaves = (layer.weight, layer.bias, head.weight)
    expected = loss_of_model()
    with torch._inductor.config.patch(compile_threads=1):  # faster than to start more
        loss = torch.compile(loss_of_model, fullgraph=True)()
        assert torch.equal(loss, expected)
        pairs = zip(*(torch.autograd.grad(x, leaves) for x in (loss, expected)), strict=True)
        for got, other in pairs:
            torch.testing.assert_close(got, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_repeated_backward_of_a_compiled_loss(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    args = (problem.weight, problem.batch(), LossConfig())
    options = dict(bias=problem.bias, schedule=schedule)
    expected = run(problem, args[2], args[1], scale=6.0, function=loss_of, schedule=schedule)
    # torch's own condition for a second backward of what it compiled
    with torch._functorch.config.patch(donated_buffer=False):
        out = whole(loss_of)(problem.hidden, *args, **options)
    out.loss.backward(retain_graph=True)
    (out.loss * 5).backward()
    for name in ("hidden", "weight", "bias"):
        torch.testing.assert_close(getattr(problem, name).grad, expected[f"d{name}"])


def test_results_of_a_compiled_loss() -> None:
    """Its metrics merge, it runs without gradients, and what it saves may be moved."""
    problem = make_problem().to("cpu", torch.float32)
    args = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    function, expected = whole(loss_of), loss_of(*args)
    got = function(*args)
    merged, other = (Metrics.merge([out.metrics, out.metrics]) for out in (got, expected))
    assert list(merged) == list(other) and repr(got.metrics) == repr(expected.metrics)
    for name in other:
        assert torch.equal(merged[name].nan_to_num(), other[name].nan_to_num()), name
    with torch.no_grad():
        out = function(*args)
    assert not out.loss.requires_grad and "entropy" in out.metrics
    torch.testing.assert_close(out.loss, got.loss.detach())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        moved = function(*args).loss
    of_moved, right = (torch.autograd.grad(x, problem.weight)[0] for x in (moved, expected.loss))
    assert torch.equal(of_moved, right)


def test_errors_come_through_the_compiler() -> None:
    problem = make_problem().to("cpu", torch.float32)
    with pytest.raises(ValueError, match="hidden: expected shape"):
        whole(loss_of)(problem.hidden[:, 1:], problem.weight, problem.batch(), LossConfig())
    args = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    buffer = torch.zeros_like(problem.weight)
    with pytest.raises(Exception, match="main_grad: expected None inside torch.compile"):
        whole(loss_of)(*args, main_grad=buffer)
    without = problem.batch(ref_logprobs=None)
    with pytest.raises(ValueError, match="ref_logprobs: expected"):
        whole(loss_of)(problem.hidden, problem.weight, without, LossConfig(beta=0.1))


def test_logprobs_compiled_are_eager_ones() -> None:
    def function(hidden: Tensor, problem: Problem, target: Tensor, temperature: Tensor) -> tuple:
        out = linear_logprobs(
            torch.tanh(hidden), problem.weight, target, bias=problem.bias, softcap=3.0,
            temperature=temperature, outputs=("logprobs", "entropy", "max_logit"),
        )  # fmt: skip
        return out.logprobs, out.entropy, out.max_logit

    def results(function: Callable, problem: Problem) -> list[Tensor]:
        temperature = problem.advantages[:, None].exp().expand(problem.target.shape)
        logp, entropy, peak = function(problem.hidden, problem, problem.target, temperature)
        total = logp.sum() + entropy.square().sum()
        leaves = (problem.hidden, problem.weight, problem.bias)
        return [logp.detach(), entropy.detach(), peak, *torch.autograd.grad(total, leaves)]

    function_compiled = whole(function)
    for length in (7, 9, 4):
        problem = make_problem(length=length).to("cpu", torch.float32)
        pairs = zip(results(function_compiled, problem), results(function, problem), strict=True)
        assert all(torch.equal(got, expected) for got, expected in pairs)
    assert graphs() <= 2  # one for the first length, one for all others
