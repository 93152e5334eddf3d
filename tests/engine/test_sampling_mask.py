"""Sampling masks: construction, log-probabilities over them, and their gradients against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import SamplingMask, available_backends, linear_logprobs
from grpo_kernels.backends import Wanted
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, Transform
from grpo_kernels.testing import (
    Problem,
    assert_all_as_exact_as,
    make_problem,
    poisoned_allocations,
)
from tests.support.heads import HEADS, head_options
from tests.support.op_checks import check_backward, check_forward
from tests.support.targets import targets

BACKENDS = [name for name in available_backends() if name != "reference"]
FLOOR = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float64: 1e-12}


def random_masks(rows: int, columns: int, device: torch.device | str = "cpu") -> SamplingMask:
    """Return masks of very different sizes: none, one, some, all; ids out of order, some twice."""
    g = torch.Generator().manual_seed(3)
    sizes = [(0, 1, 5, columns)[row % 4] for row in range(rows)]
    lists = [torch.randint(0, columns, (size,), generator=g).tolist() for size in sizes]
    lists = [list(range(columns)) if len(ids) == columns else ids for ids in lists]
    return SamplingMask.from_lists(lists, device=device)


def run(problem: Problem, head: str, **kwargs: object) -> dict[str, Tensor]:
    """Return masked log-probabilities, and the gradients of a combination of all that have one."""
    target = torch.where(problem.mask, problem.target, -100)
    sampling_mask = random_masks(target.numel(), problem.weight.shape[0], target.device)
    out = linear_logprobs(
        problem.hidden, problem.weight, target, bias=problem.bias, sampling_mask=sampling_mask,
        outputs=("masked_logprobs", "logprobs", "entropy"),
        **head_options(head, target), **kwargs,
    )  # fmt: skip
    g = torch.Generator().manual_seed(7)
    outer = torch.randn(3, *target.shape, generator=g, dtype=torch.float64).to(target.device)
    values = (out.masked_logprobs, out.logprobs, out.entropy)
    loss = sum((x.double() * dx).sum() for x, dx in zip(values, outer, strict=True))
    masked_only = (out.masked_logprobs.double() * outer[0]).sum()
    inputs = {"dhidden": problem.hidden, "dweight": problem.weight, "dbias": problem.bias}
    results = {"masked_logprobs": out.masked_logprobs}
    for label, root in (("of all", loss), ("of the mask", masked_only)):
        gradients = torch.autograd.grad(root, list(inputs.values()), retain_graph=True)
        results |= {f"{name} {label}": x for name, x in zip(inputs, gradients, strict=True)}
    return results


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_matches_fp64(backend: str, device: torch.device, head: str, dtype: torch.dtype) -> None:
    problem = make_problem(vocab_size=37)
    exact = run(problem, head, backend="reference")
    eager = run(problem.to(device, dtype), head, backend="reference")
    with poisoned_allocations():
        got = run(problem.to(device, dtype), head, backend=backend)
    assert_all_as_exact_as(got, eager, exact, FLOOR[dtype], 2e-6)


def test_gradcheck() -> None:
    problem = make_problem(2, 3, hidden_size=4, vocab_size=11)
    sampling_mask = random_masks(6, 11)

    def masked_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_logprobs(
            hidden, weight, problem.target, bias=bias, temperature=0.7, softcap=4.0,
            sampling_mask=sampling_mask,
            outputs=("masked_logprobs",), backend="chunked",
        ).masked_logprobs  # fmt: skip

    inputs = (problem.hidden, problem.weight, problem.bias)
    assert torch.autograd.gradcheck(masked_logprobs, inputs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_whole_vocabulary_is_the_plain_logprob(backend: str) -> None:
    problem = make_problem().to("cpu", torch.float32)
    rows, columns = problem.target.numel(), problem.weight.shape[0]
    everything = SamplingMask.from_padded(torch.arange(columns).expand(rows, columns))
    out = linear_logprobs(
        problem.hidden, problem.weight, problem.target, sampling_mask=everything, backend=backend,
        outputs=("logprobs", "masked_logprobs"),
    )  # fmt: skip
    torch.testing.assert_close(out.masked_logprobs, out.logprobs, rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_tiles_and_masked_rows(backend: str) -> None:
    problem = make_problem(vocab_size=37).to("cpu", torch.float32)
    whole = run(problem, "softcapped", backend=backend)
    split = run(problem, "softcapped", backend=backend, max_workspace_bytes=37 * 4 * 3)
    assert whole["masked_logprobs"][~problem.mask].eq(0).all()
    for name in whole:
        torch.testing.assert_close(split[name], whole[name], rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_nothing_to_do(backend: str) -> None:
    hidden = torch.randn(0, 4, requires_grad=True)
    sampling_mask = SamplingMask.from_lists([])
    out = linear_logprobs(
        hidden, torch.randn(9, 4), torch.zeros(0, dtype=torch.int64),
        sampling_mask=sampling_mask, backend=backend, outputs=("masked_logprobs",),
    )  # fmt: skip
    out.masked_logprobs.sum().backward()
    assert out.masked_logprobs.shape == (0,)


def test_opcheck() -> None:
    problem = make_problem(1, 5, values_in=torch.float32).to("cpu", torch.float32)
    rows = Rows(
        hidden=problem.hidden[0],
        head=Head(problem.weight, problem.bias, Transform(temperature=1.5)),
        target=problem.target[0],
        sampling_mask=random_masks(5, problem.weight.shape[0]),
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


IDS, OFFSETS = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])
FALLING = torch.tensor([0, 4, 3])
META = torch.device("meta")
csr, lists, padded = SamplingMask.from_csr, SamplingMask.from_lists, SamplingMask.from_padded


@pytest.mark.parametrize(
    "build,arguments,message",
    [
        (csr, ([1], OFFSETS), r"indices: expected a \(N,\) .* got list"),
        (csr, (IDS.float(), OFFSETS), "indices: expected int32 or int64, got"),
        (csr, (IDS, OFFSETS[None]), r"offsets: expected a \(T \+ 1,\) integer"),
        (csr, (IDS, OFFSETS.short()), "offsets: expected int32 or int64"),
        (csr, (IDS, OFFSETS.to(META)), "offsets: expected device cpu"),
        (csr, (IDS, OFFSETS[:2]), "offsets: expected values rising from 0 to N"),
        (csr, (IDS, FALLING), "offsets: .* 1 of them falling"),
        (csr, (IDS - 2, OFFSETS), r"indices: expected token ids in \[0, 2\*\*31\), got -1"),
        (lists, ([[-5]],), r"ids: expected token ids in \[0, .* got -5"),
        (lists, ([[1.5]],), "ids: expected integers, got 1.5"),
        (lists, ([[3], [True]],), "ids: expected integers, got True"),
        (lists, ([[2**62]],), r"ids: expected token ids in \[0, .* got 46116"),
        (padded, (IDS[None] + 2**62,), "ids: expected token ids in .* got 4611"),
        (padded, (IDS,), r"ids: expected a \(\.\.\., K\) integer tensor"),
        (padded, (IDS[None].half(),), "ids: expected int32 or int64"),
        (padded, (IDS[None] - 4,), r"ids: expected token ids in \[0, .* got -3"),
    ],
)
def test_bad_masks(build, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*arguments)


@pytest.mark.parametrize(
    "sampling_mask,message",
    [
        (None, "sampling_mask: expected a SamplingMask for the output 'masked_logprobs', got None"),
        ([[1]], "sampling_mask: expected a SamplingMask of 2 rows .* got list"),
        (
            SamplingMask.from_lists([[1]]),
            r"sampling_mask: expected a SamplingMask of 2 rows .* got 1 rows",
        ),
        (SamplingMask.from_lists([[1], [9]]), r"sampling_mask: expected ids in \[0, 9\), got 9"),
    ],
)
def test_sets_that_do_not_fit(sampling_mask, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        linear_logprobs(
            torch.ones(2, 4), torch.ones(9, 4), torch.tensor([1, 2]), sampling_mask=sampling_mask,
            outputs=("masked_logprobs",),
        )  # fmt: skip
