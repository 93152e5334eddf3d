"""Inside torch.compile: one graph, the bits of eager, no recompilation for a new batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from grpo_kernels import (
    HeadLoRA,
    LossConfig,
    PolicyLossOutput,
    SamplingMask,
    TokenBatch,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.losses import Metrics
from grpo_kernels.testing import LossRun, Problem, make_problem, relative_error, run

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
) -> LossRun:
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_compiled_are_eager_ones(dtype: torch.dtype) -> None:

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
        problem = make_problem(length=length).to("cpu", dtype)
        pairs = zip(results(function_compiled, problem), results(function, problem), strict=True)
        assert all(torch.equal(got, expected) for got, expected in pairs)
    assert graphs() <= 2  # one for the first length, one for all others


def test_logprobs_of_a_sampling_mask_compiled() -> None:
    problem = make_problem().to("cpu", torch.float32)
    sampling_mask = SamplingMask.from_padded(torch.randint(0, 53, (*problem.target.shape, 5)))

    def function(hidden: Tensor) -> Tensor:
        out = linear_logprobs(
            hidden,
            problem.weight,
            problem.target,
            outputs=("masked_logprobs",),
            sampling_mask=sampling_mask,
        )
        assert out.masked_logprobs is not None
        return out.masked_logprobs

    def gradient(function: Callable) -> Tensor:
        return torch.autograd.grad(function(problem.hidden).sum(), problem.hidden)[0]

    assert torch.equal(gradient(whole(function)), gradient(function))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_loss_compiled_is_the_eager_one(schedule: str, dtype: torch.dtype) -> None:
    """Other lengths, another loss and another coefficient need no new graph."""
    function = whole(loss_of)
    for length, name in ((7, "dapo"), (9, "gspo"), (5, "sapo"), (7, "vespo")):
        problem = make_problem(length=length).to("cpu", dtype)
        config = LossConfig(loss_type=name, beta=0.01 * length, rollout_correction_mode=None)
        args = (problem, config, problem.batch(num_items_in_batch=17.0 + length))
        assert_same_bits(function, loss_of, *args, schedule=schedule)
    assert graphs() <= (2 if torch.__version__ >= "2.13" else 4)  # older ones compile each loss


def test_skipped_rows_batch_scope_and_a_workspace_compiled() -> None:
    problem = make_problem().to("cpu", torch.float32)
    some = problem.batch(advantages=problem.advantages * torch.tensor([1.0, 0.0, 1.0, 0.0]))
    function = whole(loss_of)
    for batch, config, options in (
        (some, LossConfig(rollout_correction_mode=None), {}),
        (some, LossConfig(rollout_correction_mode=None), {"metric_rows": "active"}),
        (problem.batch(), LossConfig(top_entropy_quantile=0.5, entropy_coef=0.1), {}),
        (problem.batch(), LossConfig(), {"max_workspace_bytes": 53 * 4 * 3, "backend": "chunked"}),
    ):
        assert_same_bits(function, loss_of, problem, config, batch, **options)


def test_adapter_on_the_head_compiled() -> None:
    problem = make_problem().to("cpu", torch.float32)
    a, b = torch.randn(3, 16, requires_grad=True), torch.randn(53, 3, requires_grad=True)
    batch, config = problem.batch(), LossConfig(rollout_correction_mode=None)

    def function(hidden: Tensor) -> Tensor:
        lora = HeadLoRA(a=a, b=b, scaling=0.3)
        weight = problem.weight.detach()
        return linear_policy_loss(hidden, weight, batch, config, lora=lora).loss

    def gradients(function: Callable) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(problem.hidden), (problem.hidden, a, b))

    for got, expected in zip(gradients(whole(function)), gradients(function), strict=True):
        assert torch.equal(got, expected)


class Model(nn.Module):
    """A policy with its loss: what a user compiles as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 53, bias=False)

    def forward(self, inputs: Tensor, batch: TokenBatch, config: LossConfig) -> Tensor:
        hidden = self.layer(inputs).tanh()
        return linear_policy_loss(hidden, self.head.weight, batch, config).loss


def test_inductor_compiles_model_and_loss_in_one_graph() -> None:
    problem, model = make_problem().to("cpu", torch.float32), Model()
    args = (problem.hidden.detach(), problem.batch(), LossConfig())
    model(*args).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with torch._inductor.config.patch(compile_threads=1):  # faster than to start more
        loss = torch.compile(model, fullgraph=True)(*args)
        loss.backward()
    assert torch.equal(loss, model(*args))
    for parameter, other in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_compiled(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)

    def function(*args: object, **kwargs: object) -> PolicyLossOutput:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(*args, **kwargs)  # type: ignore[arg-type]

    got = assert_same_bits(whole(function), function, problem, LossConfig(), schedule=schedule)
    assert got["dweight"].dtype == torch.float32


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("autocast", (False, True))
def test_fp16_gradients_wait_for_the_loss_scale(schedule: str, autocast: bool) -> None:
    problem = make_problem()
    posed = problem.to("cpu", torch.float32 if autocast else torch.float16)

    config, tiny = LossConfig(), problem.batch(num_items_in_batch=1e6)

    def function(*args: object, **kwargs: object) -> PolicyLossOutput:
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            return loss_of(*args, **kwargs)  # type: ignore[arg-type]

    options = dict(scale=2.0**20, function=whole(function), schedule=schedule)
    got = run(posed, config, tiny, **options).gradients
    exact = run(problem, config, tiny, scale=2.0**20, function=loss_of, backend="reference")
    for name, value in exact.gradients.items():
        assert relative_error(got[name], value) < 2e-3, name


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
    for name, value in expected.gradients.items():
        torch.testing.assert_close(getattr(problem, name.removeprefix("d")).grad, value)


def test_compiled_without_grad() -> None:
    problem = make_problem().to("cpu", torch.float32)
    args = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    function = whole(loss_of)
    expected = function(*args)  # and no backward
    with torch.no_grad():
        out = function(*args)
    assert not out.loss.requires_grad and "entropy" in out.metrics
    torch.testing.assert_close(out.loss, expected.loss.detach())


def test_metrics_of_compiled_losses_merge() -> None:
    problem = make_problem().to("cpu", torch.float32)
    args = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    got, expected = whole(loss_of)(*args).metrics, loss_of(*args).metrics
    merged, other = Metrics.merge([got, got]), Metrics.merge([expected, expected])
    assert list(merged) == list(other) and repr(got) == repr(expected)
    for name in other:
        assert torch.equal(merged[name].nan_to_num(), other[name].nan_to_num()), name


def test_errors_come_through_the_compiler() -> None:
    problem = make_problem().to("cpu", torch.float32)
    with pytest.raises(ValueError, match="hidden: expected shape"):
        whole(loss_of)(problem.hidden[:, 1:], problem.weight, problem.batch(), LossConfig())
    without = problem.batch(ref_logprobs=None)
    with pytest.raises(ValueError, match="ref_logprobs: expected"):
        whole(loss_of)(problem.hidden, problem.weight, without, LossConfig(beta=0.1))


def test_saved_tensors_may_be_moved() -> None:
    problem = make_problem().to("cpu", torch.float32)
    args = (problem.hidden, problem.weight, problem.batch(), LossConfig())
    expected = torch.autograd.grad(loss_of(*args).loss, problem.weight)[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        loss = whole(loss_of)(*args).loss
    assert torch.equal(torch.autograd.grad(loss, problem.weight)[0], expected)
