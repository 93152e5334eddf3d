"""A batch with sampling masks: log-probabilities are those of what was sampled from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    FusedLinearGRPOLoss,
    LossConfig,
    SamplingMask,
    TokenBatch,
    linear_logprobs,
    policy_loss,
)
from grpo_kernels.testing import (
    Problem,
    assert_as_exact_as,
    make_problem,
    poisoned_allocations,
    relative_error,
    run,
)
from tests.support.targets import targets

TILE = 53 * 4 * 8
FLOOR = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
LOSSES = {
    "dapo": LossConfig(loss_type="dapo", beta=0.05, temperature=0.8, entropy_coef=0.01),
    "gspo": LossConfig(loss_type="gspo", temperature=0.8),
}


def sampling_mask_of(problem: Problem) -> SamplingMask:
    """Return the twelve likeliest ids of each token, as a top-k sampler keeps them."""
    logits = problem.hidden.detach().double() @ problem.weight.detach().double().t()
    return SamplingMask.from_padded(logits.topk(12).indices)


def by_hand(problem: Problem, config: LossConfig, batch: TokenBatch) -> dict:
    """Compute policy_loss on the masked log-probabilities of the eager reference."""
    out = linear_logprobs(
        problem.hidden.reshape(-1, problem.hidden.shape[-1])[batch.rows], problem.weight,
        batch.target, bias=problem.bias, temperature=config.temperature,
        sampling_mask=batch.sampling_mask, outputs=("masked_logprobs", "entropy"),
        backend="reference",
    )  # fmt: skip
    loss, metrics = policy_loss(out.masked_logprobs, batch, config, out.entropy)
    leaves = {"dhidden": problem.hidden, "dweight": problem.weight, "dbias": problem.bias}
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True)), **metrics}


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_matches_fp64(
    backend: str, device: torch.device, name: str, schedule: str, dtype: torch.dtype
) -> None:
    problem, config = make_problem(), LOSSES[name]
    sampling_mask = sampling_mask_of(problem)
    exact = by_hand(problem, config, problem.batch(sampling_mask=sampling_mask))
    posed = problem.to(device, dtype)
    batch = posed.batch(
        sampling_mask=SamplingMask.from_csr(
            sampling_mask.indices.to(device), sampling_mask.offsets.to(device)
        )
    )
    eager = run(posed, config, batch, backend="reference")
    with poisoned_allocations():
        got = run(
            posed, config, batch, backend=backend, schedule=schedule, max_workspace_bytes=TILE
        )
    for key, value in exact.items():
        floor = FLOOR[dtype] if key.startswith("d") else 1e-5
        assert_as_exact_as(got[key], eager[key], value, floor, key)


@pytest.mark.parametrize("schedule", ("one_pass", "two_pass"))
def test_rows_without_gradient_have_their_masks_too(schedule: str) -> None:
    problem = make_problem(5, 6).to("cpu", torch.float32)
    advantages = problem.advantages.clone()
    advantages[[0, 3]] = 0
    config = LossConfig(loss_type="dapo")
    batch = problem.batch(
        sampling_mask=sampling_mask_of(problem), advantages=advantages, ref_logprobs=None
    )
    exact = by_hand(problem, config, batch)
    got = run(problem, config, batch, schedule=schedule)
    assert got["frac_rows_skipped"] > 0
    for name, value in exact.items():
        assert relative_error(got[name], value) < 1e-5, name


def test_packed_equals_padded_and_module() -> None:
    problem = make_problem().to("cpu", torch.float32)
    sampling_mask, config, shape = (
        sampling_mask_of(problem),
        LossConfig(loss_type="dapo"),
        problem.target.shape,
    )
    expected = run(problem, config, problem.batch(sampling_mask=sampling_mask))["loss"]
    module = FusedLinearGRPOLoss(loss_type="dapo")
    logprobs: dict[str, Tensor] = problem.logprobs
    padded = module(
        problem.hidden, problem.weight, problem.target, problem.advantages, problem.mask,
        bias=problem.bias, sampling_mask=sampling_mask, **logprobs,
    )  # fmt: skip
    packed = module(
        problem.hidden.flatten(0, 1), problem.weight, problem.target.flatten(),
        problem.advantages, problem.mask.flatten(), bias=problem.bias, sampling_mask=sampling_mask,
        cu_seqlens=torch.arange(0, shape.numel() + 1, shape[1]),
        **{name: value.flatten() for name, value in logprobs.items()},
    )  # fmt: skip
    torch.testing.assert_close(padded.loss.detach(), expected)
    torch.testing.assert_close(packed.loss.detach(), expected)


def test_selected_tokens_keep_their_masks() -> None:
    problem = make_problem()
    batch = problem.batch(sampling_mask=sampling_mask_of(problem))
    keep = torch.arange(1, batch.num_tokens, 3)
    part = batch.select(keep)
    for row, source in enumerate(keep.tolist()):
        rows = (
            part.sampling_mask.take(slice(row, row + 1)),
            batch.sampling_mask.take(slice(source, source + 1)),
        )
        assert torch.equal(rows[0].indices, rows[1].indices)
    assert batch.narrow(2, 5).sampling_mask.num_rows == 3


@pytest.mark.parametrize(
    "make,message",
    [
        (
            lambda sampling_mask: [[1]],
            r"sampling_mask: expected a SamplingMask of 28 rows .* got list",
        ),
        (
            lambda sampling_mask: sampling_mask.take(slice(0, 9)),
            "sampling_mask: expected a SamplingMask of 28 rows .* got 9 rows",
        ),
        (
            lambda sampling_mask: SamplingMask.from_lists([[99]] * 28),
            r"sampling_mask: expected ids in \[0, 53\), got 99",
        ),
    ],
)
def test_masks_that_do_not_fit(make, message: str) -> None:
    problem = make_problem()
    with pytest.raises(ValueError, match=message):
        run(problem, LossConfig(), problem.batch(sampling_mask=make(sampling_mask_of(problem))))
