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
    available_backends,
    explain,
    linear_policy_loss,
)
from grpo_kernels.losses import LOSSES, NamedLoss, Surrogate, Terms
from grpo_kernels.schedule import plan as plans
from grpo_kernels.schedule.loss_stage import (
    GeneratedStage,
    LossStage,
    RowKernelStage,
    SegmentStage,
)
from grpo_kernels.schedule.plan import sequence_chunks
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

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
COMPILED = (
    pytest.param(torch.float32, {"beta": 0.05, "entropy_coef": 0.01}, "one_pass", id="float32"),
    pytest.param(torch.bfloat16, {}, "one_pass", id="bfloat16"),
    pytest.param(torch.float16, {"beta": 0.05}, "two_pass", id="float16"),
)
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


def assert_exact(
    problem: Problem, config: LossConfig, device: torch.device, dtype: torch.dtype, **options: Any
) -> None:
    exact = run(problem, config, backend="reference")
    eager = run(problem.to(device, dtype), config, backend="reference")
    with poisoned_allocations():
        got = run(problem.to(device, dtype), config, **options)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype])


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
    assert_exact(problem, config, device, torch.float32, schedule=schedule, **options)


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


def test_fp16_gradients_survive_a_tiny_loss() -> None:
    """Weights of 1e-6 would underflow as fp16 logit gradients; GradScaler comes after the op."""
    problem = make_problem()
    config = make_config("dapo")
    tiny = problem.batch(num_items_in_batch=1e6)
    scale = 2.0**20

    exact = run(problem, config, tiny, scale=scale, backend="reference").gradients
    for schedule in ("one_pass", "two_pass"):
        half = problem.to("cpu", torch.float16)
        got = run(half, config, tiny, scale=scale, schedule=schedule).gradients
        for name, expected in exact.items():
            assert relative_error(got[name], expected) < 2e-3, name


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


def test_plans_say_what_runs() -> None:
    problem = make_problem().to("cpu", torch.float32)
    batch = problem.batch()

    def plan(config: LossConfig, **kwargs: object):
        return explain(problem.hidden, problem.weight, batch, config, **kwargs)

    token = plan(LossConfig(rollout_correction_mode=None), max_workspace_bytes=TILE)
    assert (token.schedule, token.scope) == ("one_pass", "token")
    assert sum(c.stop - c.start for c in token.chunks) == batch.num_tokens
    assert token.workspace_bytes <= TILE
    assert "one_pass" in str(token) and token.backend in str(token)
    longest = max(batch.lengths)
    fits = plan(LossConfig(loss_type="gspo"), max_workspace_bytes=53 * 4 * longest)
    assert (fits.schedule, fits.scope) == ("one_pass", "sequence")
    long = plan(LossConfig(loss_type="gspo"), max_workspace_bytes=53 * 4 * (longest - 1))
    assert long.schedule == "two_pass" and "does not fit" in str(long)
    a, b = torch.zeros(7, 16), torch.zeros(53, 7)
    assert "LoRA of rank 7" in str(plan(LossConfig(), lora=HeadLoRA(a=a, b=b, scaling=1.0)))
    gate = plan(LossConfig(top_entropy_quantile=0.5))
    assert gate.schedule == "two_pass" and gate.scope == "batch"
    with pytest.raises(ValueError, match="schedule: 'one_pass' cannot run"):
        plan(LossConfig(top_entropy_quantile=0.5), schedule="one_pass")


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
def test_plans_say_how_the_loss_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem(2, 3).to("cpu", torch.float32)
    batch = problem.batch(rollout_logprobs=None)
    args = (problem.hidden, problem.weight, batch)
    token = explain(*args, LossConfig(), backend="triton")
    assert token.stage is RowKernelStage and "generated from the loss" in str(token)
    half = make_problem(2, 3).to("cpu", torch.float16)
    scaled = explain(half.hidden, half.weight, batch, LossConfig(), backend="triton")
    assert scaled.stage is GeneratedStage
    sequence = explain(*args, LossConfig(loss_type="gspo"), backend="triton")
    assert sequence.stage is SegmentStage and "sums over sequences" in str(sequence)

    class Sorted(Surrogate):
        """A surrogate that cannot be traced."""

        def __call__(self, terms: Terms) -> Tensor:
            return -terms.advantages * terms.logprobs.sort().values

    named = NamedLoss(surrogate=Sorted, aggregation="token_mean", source="here")
    monkeypatch.setitem(LOSSES, "sorted", named)
    untraced = explain(*args, LossConfig(loss_type="sorted"), backend="triton")
    assert untraced.stage is LossStage and "torch ops, because" in str(untraced)


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name,coefficient", [("dapo", 0.0), ("cispo", 0.1), ("sapo", 0.0)])
def test_one_row_kernel_gives_what_three_do(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, name: str, coefficient: float
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = make_config(name, temperature=0.8, beta=0.1, entropy_coef=coefficient)
    problem = make_problem(2, 3).to(device, dtype)
    one = run(problem, config, backend="triton", max_workspace_bytes=TILE)
    monkeypatch.setattr(plans, "choose_stage", lambda *_: GeneratedStage)
    three = run(problem, config, backend="triton", max_workspace_bytes=TILE)
    one_read = dtype == torch.bfloat16 and coefficient == 0  # rounds the gradient elsewhere
    for key, value in one.items():
        if one_read and key in one.gradients:
            torch.testing.assert_close(value, three[key], rtol=0.02, atol=0.02 * value.abs().max())
        else:
            assert torch.equal(value, three[key]), key


def test_sequence_chunks_end_where_sequences_end() -> None:
    assert sequence_chunks((3, 0, 4, 2, 5), 7) == [slice(0, 7), slice(7, 14)]
    assert sequence_chunks((3, 0, 4, 2, 5), 5) == [slice(0, 3), slice(3, 7), slice(7, 9),
                                                   slice(9, 14)]  # fmt: skip
    assert sequence_chunks((), 5) == [] and sequence_chunks((0, 0), 5) == []
