"""linear_policy_loss: every schedule and backend against eager fp64, and the autograd around it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    FusedLinearGRPOLoss,
    HeadLoRA,
    LossConfig,
    PolicyLossOutput,
    SamplingMask,
    TokenBatch,
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
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1.5e-3}


schedules = pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
config_for = functools.partial(make_config, temperature=0.8)


def assert_matches_eager(
    config: LossConfig,
    dtype: torch.dtype,
    problem: Problem | None = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> None:
    problem = problem or make_problem()
    exact = run(problem.to("cpu", torch.float64), config, backend="reference")
    eager = run(problem.to(device, dtype), config, backend="reference")
    with poisoned_allocations():
        got = run(problem.to(device, dtype), config, **kwargs)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype])


@pytest.mark.parametrize("name", LOSSES)
@schedules
@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("tile", (None, TILE))
def test_every_loss_and_schedule(
    name: str, schedule: str, backend: str, device: torch.device, tile: int | None
) -> None:
    config = config_for(name, beta=0.05, entropy_coef=0.01)
    options = dict(backend=backend, schedule=schedule, max_workspace_bytes=tile)
    assert_matches_eager(config, torch.float32, device=device, **options)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", ("dapo", "gspo"))
@schedules
@pytest.mark.parametrize("backend,device", targets("triton"))
def test_dtypes(
    dtype: torch.dtype, name: str, schedule: str, backend: str, device: torch.device
) -> None:
    config = config_for(name, beta=0.05)
    options = dict(backend=backend, schedule=schedule, max_workspace_bytes=TILE)
    assert_matches_eager(config, dtype, device=device, **options)


@pytest.mark.parametrize("name", LOSSES)
def test_batch_scope_and_gates(name: str) -> None:
    config = config_for(
        name, top_entropy_quantile=0.6, entropy_coef=0.02, off_policy_mask_threshold=0.05
    )
    assert_matches_eager(config, torch.float32)


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("options", ({}, {"beta": 0.05, "entropy_coef": 0.01}))
def test_triton(name: str, options: dict[str, object]) -> None:
    problem = make_problem(3, 4, vocab_size=21)
    assert_matches_eager(config_for(name, **options), torch.float32, problem, backend="triton")


@pytest.mark.parametrize("name", LOSSES)
def test_packed_equals_padded(name: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    config = config_for(name, beta=0.05)
    padded = run(problem, config, problem.batch())
    shape = problem.target.shape
    packed = TokenBatch.from_packed(
        problem.target.reshape(-1),
        problem.advantages,
        torch.arange(0, shape.numel() + 1, shape[1]),
        problem.mask.reshape(-1),
        **{key: value.reshape(-1) for key, value in problem.logprobs.items()},
    )
    flat = Problem(**{**vars(problem), "hidden": problem.hidden.detach().flatten(0, 1)})
    got = dict(run(flat.to("cpu", torch.float32), config, packed))
    got["dhidden"] = got["dhidden"].reshape(padded["dhidden"].shape)
    for key in padded:
        torch.testing.assert_close(got[key], padded[key], equal_nan=True)


@pytest.mark.parametrize("name", ("dapo", "gspo", "sapo"))
def test_per_token_advantages(name: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    config = config_for(name)
    per_sequence = run(problem, config, problem.batch())
    each = problem.advantages[:, None].expand(problem.target.shape).contiguous()
    per_token = run(problem, config, problem.batch(advantages=each))
    for key in per_sequence:
        torch.testing.assert_close(per_token[key], per_sequence[key], equal_nan=True)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", ("auto", "two_pass"))
def test_zero_advantage_rows_are_skipped_and_still_measured(name: str, schedule: str) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    advantages = problem.advantages.clone()
    advantages[[0, 3]] = 0
    batch = problem.batch(advantages=advantages)
    config = config_for(name)
    exact = run(problem.to("cpu", torch.float64), config, batch, backend="reference")
    got = run(problem, config, batch, schedule=schedule)
    active = int(problem.mask[[1, 4]].sum())
    assert got["frac_rows_skipped"].item() == pytest.approx(1 - active / 30)
    for key in exact:
        assert relative_error(got[key], exact[key]) < 1e-5, key
    assert torch.equal(got["dhidden"][[0, 3]], torch.zeros(2, 6, 16))


def test_masked_hidden_states_may_be_anything() -> None:
    problem = make_problem().to("cpu", torch.float32)
    expected = run(problem, config_for("grpo"))
    with torch.no_grad():
        problem.hidden[~problem.mask] = float("nan")
    got = run(problem, config_for("grpo"))
    for key in expected:
        torch.testing.assert_close(got[key], expected[key], equal_nan=True)


@schedules
@pytest.mark.parametrize("name", ("dapo", "gspo"))
def test_all_masked_batch_gives_zero_with_a_live_graph(name: str, schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    batch = problem.batch(mask=torch.zeros_like(problem.mask))
    got = run(problem, config_for(name, beta=0.1), batch, schedule=schedule)
    assert got["loss"] == 0 and not got["dhidden"].any() and not got["dweight"].any()


@schedules
def test_entropy_coefficient_that_comes_with_the_batch(schedule: str) -> None:
    """A factor of the batch is the same as a coefficient of the config, and needs no new config."""
    problem = make_problem().to("cpu", torch.float32)
    fixed = run(problem, config_for("bnpo", entropy_coef=0.3), schedule=schedule)
    batch = problem.batch(
        num_items_in_batch=17.0, gradient_accumulation_steps=2, entropy_scale=torch.tensor(0.3)
    )
    scaled = run(problem, config_for("bnpo", entropy_coef=1.0), batch=batch, schedule=schedule)
    for name in ("loss", "dhidden", "dweight"):
        torch.testing.assert_close(scaled[name], fixed[name])


@schedules
def test_scaled_and_repeated_backward(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    config = config_for("dapo")
    expected = run(problem, config, schedule=schedule).gradients
    out = linear_policy_loss(
        problem.hidden, problem.weight, problem.batch(
            num_items_in_batch=17.0, gradient_accumulation_steps=2), config,
        bias=problem.bias, schedule=schedule,
    )  # fmt: skip
    for factor, total in ((8, 8), (-2, 6), (1, 7)):
        (out.loss * factor).backward(retain_graph=True)
        for name, gradient in expected.items():
            found = getattr(problem, name.removeprefix("d")).grad
            torch.testing.assert_close(found, gradient * total)


def test_fp16_gradients_survive_a_tiny_loss() -> None:
    """Weights of 1e-6 would underflow as fp16 logit gradients; GradScaler comes after the op."""
    problem = make_problem()
    config = config_for("dapo")
    tiny = problem.batch(num_items_in_batch=1e6)
    scale = 2.0**20

    exact = run(problem, config, tiny, scale=scale, backend="reference").gradients
    for schedule in ("one_pass", "two_pass"):
        half = problem.to("cpu", torch.float16)
        got = run(half, config, tiny, scale=scale, schedule=schedule).gradients
        for name, expected in exact.items():
            assert relative_error(got[name], expected) < 2e-3, name


@pytest.mark.parametrize("tile", (None, TILE))
@pytest.mark.parametrize("head", ("plain", "sampling_mask", "lora", "main_grad"))
def test_fp16_gradients_survive_a_huge_ratio(tile: int | None, head: str) -> None:
    """One token's ratio is e^18, whose fp16 gradient of the logits would be infinite."""
    problem = make_problem()
    old = problem.logprobs["old_logprobs"].clone()
    row = tuple(problem.mask.nonzero()[-1].tolist())
    old[row] -= 18
    fields: dict[str, object] = {
        "num_items_in_batch": 1e5,
        "old_logprobs": old,
        "rollout_logprobs": None,
        "advantages": -problem.advantages.abs(),
    }
    if head == "sampling_mask":
        ids = torch.arange(53).expand(problem.target.numel(), 53)
        fields["sampling_mask"] = SamplingMask.from_padded(ids.contiguous())
    batch = problem.batch(**fields)
    generator = torch.Generator().manual_seed(3)
    factors = [torch.randn(shape, generator=generator) for shape in ((2, 16), (53, 2))]

    def gradients(dtype: torch.dtype, **kwargs: object) -> list[Tensor]:
        posed = problem.to("cpu", dtype)
        leaves = {"hidden": posed.hidden, "weight": posed.weight}
        if head == "lora":
            leaves["a"], leaves["b"] = (factor.to(dtype).requires_grad_() for factor in factors)
            kwargs["lora"] = HeadLoRA(a=leaves["a"], b=leaves["b"], scaling=0.5)
        buffer = torch.zeros(posed.weight.shape)
        if head == "main_grad" and dtype == torch.float16:
            kwargs["main_grad"] = buffer
        found = run(posed, config_for("dapo"), batch, leaves=leaves, **kwargs).gradients
        return [found.get(f"d{name}", buffer) for name in leaves]

    exact = gradients(torch.float64, backend="reference")
    assert max(value.abs().max() for value in exact) > 100
    got = gradients(torch.float16, schedule="one_pass", max_workspace_bytes=tile)
    for value, expected in zip(got, exact, strict=True):
        assert relative_error(value, expected) < 3e-3


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
        problem.hidden, problem.weight, batch, config_for("dapo"), schedule=schedule
    )
    out.loss.backward(retain_graph=True)
    getattr(batch, changed).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


@schedules
def test_autocast(schedule: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    half = run(make_problem().to("cpu", torch.bfloat16), config_for("dapo"), schedule=schedule)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(problem, config_for("dapo"), schedule=schedule)
    assert got["dweight"].dtype == torch.float32
    for name, bound in (("loss", 1e-5), ("dweight", 1e-2), ("dhidden", 1e-2)):
        assert relative_error(got[name], half[name]) < bound


def test_module_is_the_function() -> None:
    problem = make_problem().to("cpu", torch.float32)
    expected = run(problem, config_for("dapo", beta=0.1), problem.batch())
    module = FusedLinearGRPOLoss(
        loss_type="dapo", beta=0.1, temperature=0.8, rollout_correction_mode="token_truncate",
        schedule="two_pass",
    )  # fmt: skip
    out = module(
        problem.hidden, problem.weight, problem.target, problem.advantages, problem.mask,
        bias=problem.bias, **problem.logprobs,
    )  # fmt: skip
    assert isinstance(out, PolicyLossOutput)
    torch.testing.assert_close(out.loss.detach(), expected["loss"])
    assert "dapo" in repr(module)
    shape = problem.target.shape
    packed = module(
        problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten(),
        problem.advantages, problem.mask.flatten(),
        cu_seqlens=torch.arange(0, shape.numel() + 1, shape[1], dtype=torch.int32),
        bias=problem.bias, **{key: value.flatten() for key, value in problem.logprobs.items()},
    )  # fmt: skip
    torch.testing.assert_close(packed.loss, out.loss)


def test_loss_and_metrics_do_not_depend_on_the_tile() -> None:
    problem = make_problem().to("cpu", torch.float32)
    whole = run(problem, config_for("dapo"))
    for rows in (1, 2, 5):
        cut = run(problem, config_for("dapo"), max_workspace_bytes=53 * 4 * rows)
        for key in whole:
            torch.testing.assert_close(cut[key], whole[key], rtol=1e-5, atol=1e-6, equal_nan=True)


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
    config = config_for(name, beta=0.1, entropy_coef=coefficient)
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
