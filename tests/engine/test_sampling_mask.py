"""Sampling masks: construction, and log-probabilities at the ends of their range."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import SamplingMask, available_backends, linear_logprobs
from grpo_kernels.backends import Wanted
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import make_problem
from tests.support.op_checks import check_backward, check_forward

BACKENDS = [name for name in available_backends() if name != "reference"]


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("listed", (True, False))
def test_a_lone_target_has_logprob_zero_and_no_gradient(backend: str, listed: bool) -> None:
    problem = make_problem().to("cpu", torch.float32)
    ids = problem.target.reshape(-1, 1)
    sampling_mask = SamplingMask.from_padded(ids if listed else torch.full_like(ids, -1))
    out = linear_logprobs(
        problem.hidden, problem.weight, problem.target, sampling_mask=sampling_mask, softcap=3.0,
        outputs=("masked_logprobs",), backend=backend,
    )  # fmt: skip
    assert torch.equal(out.masked_logprobs, torch.zeros(problem.target.shape))
    (gradient,) = torch.autograd.grad(out.masked_logprobs.sum(), problem.hidden)
    assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gap", (14.0, 60.0))
def test_exact_near_all_and_near_none_of_the_mass(backend: str, gap: float) -> None:
    """One id outweighs all others; the target is that one, or one of two that hardly weigh."""
    weight = torch.zeros(9, 1)
    weight[3] = gap
    hidden, target = torch.ones(2, 1), torch.tensor([3, 5])
    sampling_mask = SamplingMask.from_lists([[3, 5], [6]])
    out = linear_logprobs(
        hidden, weight, target, sampling_mask=sampling_mask, outputs=("masked_logprobs",),
        backend=backend,
    )  # fmt: skip
    expected = -torch.log1p(torch.tensor([-gap, 0.0], dtype=torch.float64).exp())
    torch.testing.assert_close(out.masked_logprobs.double(), expected, rtol=1e-6, atol=0)


def test_opcheck() -> None:
    problem = make_problem(1, 5, values_in=torch.float32).to("cpu", torch.float32)
    rows = Rows(
        hidden=problem.hidden[0],
        head=Head(problem.weight, problem.bias, Transform(temperature=1.5)),
        target=problem.target[0],
        sampling_mask=SamplingMask.from_lists([[], [7], [52, 3, 3], list(range(53)), [0]]),
    )
    options = RunOptions(backend="chunked", max_workspace_bytes=2 * 53 * 4)
    check_forward(rows, options, Wanted(extras=True))
    check_backward(rows, options, (None, None, torch.randn(5)), (True, True, False, False, False))


def test_ways_to_build_one() -> None:
    lists = [[7, 2, 7], [], [0]]
    built = [
        SamplingMask.from_lists(lists),
        SamplingMask.from_padded(torch.tensor([[7, 2, 7], [-1, -1, -1], [-1, 0, -1]])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]), torch.tensor([0, 3, 3, 4])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]).int(), torch.tensor([0, 3, 3, 4]).int()),
    ]
    for sampling_mask in built:
        assert (
            sampling_mask.indices.tolist() == [2, 7, 0]
            and sampling_mask.indices.dtype == torch.int64
        )
        assert sampling_mask.offsets.tolist() == sampling_mask.bounds.tolist() == [0, 2, 2, 3]
        assert (
            sampling_mask.num_rows == 3
            and sampling_mask.max_id == 7
            and sampling_mask.rows.tolist() == [0, 0, 2]
        )
    empty = SamplingMask.from_lists([[], []])
    assert empty.num_rows == 2 and empty.indices.numel() == 0


def test_rows_of_one() -> None:
    sampling_mask = SamplingMask.from_lists([[1, 4], [], [3], [0, 2, 5]])
    for index in (slice(1, 4), torch.tensor([1, 2, 3])):
        part = sampling_mask.take(index)
        assert part.indices.tolist() == [3, 0, 2, 5]
        assert part.offsets.tolist() == part.bounds.tolist() == [0, 0, 1, 4]
    turned = sampling_mask.take(torch.tensor([3, 0]))
    assert turned.indices.tolist() == [0, 2, 5, 1, 4] and turned.offsets.tolist() == [0, 3, 5]
    assert sampling_mask.take(torch.tensor([], dtype=torch.int64)).num_rows == 0
