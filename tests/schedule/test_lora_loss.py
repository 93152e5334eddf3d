"""linear_policy_loss with LoRA on the head: schedules and backends against fp64 on the merged
weight, and what the trained adapter costs in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_kernels import (
    FusedLinearGRPOLoss,
    HeadLoRA,
    LossConfig,
    PolicyLossOutput,
    SamplingMask,
    available_backends,
    explain,
    linear_logprobs,
    linear_policy_loss,
    testing,
)
from grpo_kernels.testing import (
    LossRun,
    assert_all_as_exact_as,
    assert_as_exact_as,
    poisoned_allocations,
)
from tests.support.lora_problems import NAMES, LoRAProblem, largest_allocation, lora_problem
from tests.support.targets import targets

pytestmark = pytest.mark.usefixtures("narrow_slices")

TILE = 53 * 4 * 8  # eight fp32 rows of the test vocabulary
SCHEDULES = ("one_pass", "two_pass")
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
LOSSES = {
    "dapo": LossConfig(loss_type="dapo", beta=0.05, temperature=0.8, entropy_coef=0.01),
    "gspo": LossConfig(loss_type="gspo", temperature=0.8),
    "batch scope": LossConfig(loss_type="grpo", top_entropy_quantile=0.6),
}


def loss_of(posed: LoRAProblem, config: LossConfig, **kwargs: object) -> PolicyLossOutput:
    problem = posed.problem
    return linear_policy_loss(
        problem.hidden, problem.weight, problem.batch(), config,
        bias=problem.bias, lora=posed.lora, **kwargs,
    )  # type: ignore[arg-type]  # fmt: skip


def run(posed: LoRAProblem, config: LossConfig, merged: bool = False, **kwargs: object) -> LossRun:
    """Return loss, metrics, and the gradients of head and adapter."""
    head = {"weight": posed.merged} if merged else {"lora": posed.lora}
    leaves = {name.removeprefix("d"): leaf for name, leaf in zip(NAMES, posed.leaves, strict=True)}
    batch = posed.problem.batch(**kwargs.pop("batch", {}))  # type: ignore[arg-type]
    return testing.run(posed.problem, config, batch, leaves=leaves, **head, **kwargs)


def assert_matches_fp64(
    posed: LoRAProblem,
    config: LossConfig,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    factors: torch.dtype = torch.float32,
    **kwargs: object,
) -> None:
    batch = kwargs.get("batch", {})
    exact = run(posed, config, merged=True, backend="reference", batch=batch)
    half = posed.to(device, dtype, factors)
    eager = run(half, config, backend="reference", batch=batch)
    with poisoned_allocations():
        got = run(half, config, **kwargs)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype])


@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_matches_fp64(
    backend: str, device: torch.device, dtype: torch.dtype, loss: str, schedule: str
) -> None:
    if loss == "batch scope" and schedule == "one_pass":
        pytest.skip("such a loss cannot run in one pass")
    options = dict(backend=backend, schedule=schedule, max_workspace_bytes=TILE)
    assert_matches_fp64(lora_problem(), LOSSES[loss], dtype, device, **options)


@pytest.mark.parametrize("backend,device", targets("triton"))
@pytest.mark.parametrize("dtype", FLOOR)
def test_kept_logits(backend: str, device: torch.device, dtype: torch.dtype) -> None:
    options = dict(backend=backend, schedule="two_pass", activation_bytes=1 << 20)
    assert_matches_fp64(lora_problem(), LOSSES["gspo"], dtype, device, **options)


@pytest.mark.skipif("triton" not in available_backends(), reason="no Triton on this machine")
@pytest.mark.parametrize("loss", ("dapo", "gspo"))
@pytest.mark.parametrize("dtype", FLOOR)
def test_triton(loss: str, dtype: torch.dtype) -> None:
    posed = lora_problem(sequences=2, length=3, hidden_size=8, vocab_size=21)
    schedule = "one_pass" if loss == "dapo" else "two_pass"
    assert_matches_fp64(posed, LOSSES[loss], dtype, backend="triton", schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_sampling_masks(schedule: str, dtype: torch.dtype) -> None:
    posed = lora_problem()
    logits = (posed.problem.hidden @ posed.merged.t()).detach()
    batch = {"sampling_mask": SamplingMask.from_padded(logits.topk(12).indices)}
    options = dict(schedule=schedule, max_workspace_bytes=TILE, batch=batch)
    assert_matches_fp64(posed, LOSSES["dapo"], dtype, **options)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", ({}, {"softcap": 3.0, "logit_scale": 0.5}))
@pytest.mark.parametrize("metrics", ("all", "active"))
def test_rows_without_gradient(schedule: str, options: dict[str, float], metrics: str) -> None:
    posed = lora_problem(sequences=5)
    advantages = posed.problem.advantages.clone()
    advantages[[0, 3]] = 0
    config, batch = LossConfig(loss_type="dapo"), {"advantages": advantages, "ref_logprobs": None}
    exact = run(posed, config, merged=True, backend="reference", batch=batch, **options)
    half = posed.to("cpu", torch.float32, torch.float32)
    got = run(half, config, schedule=schedule, batch=batch, metric_rows=metrics, **options)
    for name in ("loss", *NAMES):
        assert_as_exact_as(got[name], exact[name], exact[name], 1e-5, name)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", FLOOR)
@pytest.mark.parametrize("factors", (torch.bfloat16, torch.float64))
def test_factors_of_any_dtype(schedule: str, dtype: torch.dtype, factors: torch.dtype) -> None:
    posed = lora_problem()
    assert_matches_fp64(posed, LOSSES["dapo"], dtype, factors=factors, schedule=schedule)
    assert run(posed.to("cpu", dtype, factors), LOSSES["dapo"])["da"].dtype == factors


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast(schedule: str) -> None:
    full = lora_problem().to("cpu", torch.float32, torch.float32)
    half = lora_problem().to("cpu", torch.bfloat16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(full, LOSSES["dapo"], schedule=schedule)
    for name, value in run(half, LOSSES["dapo"], schedule=schedule).items():
        torch.testing.assert_close(got[name], value.float(), rtol=2e-2, atol=1e-3, msg=name)
        assert got[name].dtype == torch.float32 or not name.startswith("d")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", FLOOR)
def test_no_weight_sized_tensor_with_a_frozen_base(schedule: str, dtype: torch.dtype) -> None:
    posed = lora_problem(sequences=1, length=3, hidden_size=64, vocab_size=999, rank=4)
    posed = posed.to("cpu", dtype, torch.float32).frozen()
    with largest_allocation() as seen:
        out = loss_of(posed, LOSSES["dapo"], schedule=schedule)
        out.loss.backward()
    assert posed.lora.a.grad is not None and posed.lora.b.grad is not None
    assert 0 < seen.elements < posed.problem.weight.numel() / 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_gradient_into_a_buffer(schedule: str) -> None:
    posed = lora_problem().to("cpu", torch.bfloat16, torch.float32)
    expected = run(posed, LOSSES["dapo"], schedule=schedule)
    buffer = torch.ones(posed.problem.weight.shape)
    out = loss_of(posed, LOSSES["dapo"], schedule=schedule, main_grad=buffer)
    out.loss.backward()
    torch.testing.assert_close(buffer - 1, expected["dweight"].float(), rtol=1e-2, atol=1e-4)
    assert torch.equal(posed.lora.a.grad, expected["da"])
    assert torch.equal(posed.lora.b.grad, expected["db"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_twice_and_scaled(schedule: str) -> None:
    posed = lora_problem().to("cpu", torch.float32, torch.float32)
    loss = loss_of(posed, LOSSES["dapo"], schedule=schedule).loss
    once = torch.autograd.grad(loss, posed.leaves, retain_graph=True)
    again = torch.autograd.grad(3 * loss, posed.leaves)
    for first, second in zip(once, again, strict=True):
        torch.testing.assert_close(second, 3 * first)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", FLOOR)
def test_two_runs_give_the_same_bits(schedule: str, dtype: torch.dtype) -> None:
    first, second = (
        run(lora_problem().to("cpu", dtype, torch.float32), LOSSES["gspo"], schedule=schedule)
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in NAMES)


@pytest.mark.parametrize("dtype", FLOOR)
def test_on_policy_ratio_is_exactly_one_in_the_invariant_mode(dtype: torch.dtype) -> None:
    posed = lora_problem(hidden_size=40).to("cpu", dtype, torch.float32)
    problem = posed.problem
    with torch.no_grad():
        old = linear_logprobs(
            problem.hidden, problem.weight, problem.target, bias=problem.bias, lora=posed.lora,
            batch_invariant=True,
        ).logprobs  # fmt: skip
    options = dict(batch_invariant=True, batch={"old_logprobs": old})
    metrics = run(posed, LossConfig(loss_type="dapo"), **options).metrics
    assert metrics["ratio/min"] == metrics["ratio/max"] == 1


def test_nothing_to_do() -> None:
    posed = lora_problem(sequences=2, length=3).to("cpu", torch.bfloat16, torch.float32)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    for schedule in SCHEDULES:
        got = run(posed, LOSSES["dapo"], schedule=schedule, batch={"mask": mask})
        assert all(torch.equal(got[name], torch.zeros_like(got[name])) for name in NAMES)


def test_module_takes_it() -> None:
    posed = lora_problem().to("cpu", torch.float32, torch.float32)
    problem, expected = posed.problem, loss_of(posed, LossConfig()).loss
    module = FusedLinearGRPOLoss()
    got = module(
        problem.hidden, problem.weight, problem.target, problem.advantages, problem.mask,
        bias=problem.bias, lora=posed.lora, **problem.logprobs,
    )  # fmt: skip
    torch.testing.assert_close(got.loss, expected)


def test_explain_says_it() -> None:
    posed = lora_problem(rank=7).to("cpu", torch.float32, torch.float32)
    problem = posed.problem
    plan = explain(problem.hidden, problem.weight, problem.batch(), LossConfig(), lora=posed.lora)
    assert "LoRA of rank 7" in str(plan)


def test_wrong_adapters() -> None:
    posed = lora_problem().to("cpu", torch.float32, torch.float32)
    for name, lora in (
        ("a", replace(posed.lora, a=posed.lora.a[:, 1:])),
        ("b", replace(posed.lora, b=posed.lora.b[1:])),
        ("scaling", HeadLoRA(a=posed.lora.a, b=posed.lora.b, scaling=float("inf"))),
    ):
        with pytest.raises(ValueError, match=rf"lora\.{name}: expected"):
            loss_of(replace(posed, lora=lora), LossConfig())
