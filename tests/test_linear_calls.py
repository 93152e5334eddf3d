"""The three functions of a linear head: what ``tests/net`` does not generate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    HeadLoRA,
    LossConfig,
    SamplingMask,
    TokenBatch,
    available_backends,
    explain_divergence,
    linear_divergence,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.backends import torch_backend
from grpo_kernels.testing import make_config, make_problem, relative_error, run
from tests.net import product
from tests.net.cases import DIVERGENCES, Case
from tests.net.judge import Judge
from tests.net.problem import make_problem as problem_of
from tests.support.targets import targets

ON_CPUS = sorted({"cpu", "chunked"} & {*available_backends()})
backends = pytest.mark.parametrize("backend", ON_CPUS)


# --- log-probabilities


@backends
def test_digits_beside_a_target_that_is_nearly_certain(backend: str) -> None:
    """1 - p is a sum of the others there; eager, by which the net allows errors, subtracts."""
    peaks = torch.tensor([8.0, 10.0, 12.0, 14.0, 16.0])
    hidden = torch.nn.functional.pad(peaks[:, None], (0, 2)).requires_grad_()
    weight, target = torch.eye(3), torch.zeros(5, dtype=torch.int64)
    out = linear_logprobs(hidden, weight, target, backend=backend)
    (gradient,) = torch.autograd.grad(out.logprobs.sum(), hidden)
    others = 1 / (2 + peaks.double().exp())
    exact = torch.stack([2 * others, -others, -others], 1)
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=0)


def test_numpy_temperature() -> None:
    """np.float32 is no subclass of float, as np.float64 is."""
    hidden, weight, target = torch.randn(3, 4), torch.randn(9, 4), torch.arange(3)
    expected, got = (
        linear_logprobs(hidden, weight, target, temperature=temperature).logprobs
        for temperature in (0.5, np.float32(0.5))
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("backend,device", targets())
@pytest.mark.parametrize("of_head", (False, True))
def test_a_row_without_a_softmax_counts_where_it_has_a_gradient(
    backend: str, device: torch.device, of_head: bool
) -> None:
    problem = make_problem().to(device, torch.float32)
    hidden = problem.hidden.detach().clone()
    hidden[0, 1] = torch.nan
    hidden.requires_grad_()
    weight = problem.weight.detach().requires_grad_(of_head)
    for dlogp, spoilt in ((0.0, False), (1.0, True)):
        out = linear_logprobs(
            hidden, weight, problem.target, backend=backend, activation_bytes=1 << 20
        )
        factor = torch.ones_like(out.logprobs)
        factor[0, 1] = dlogp
        inputs = (hidden, weight) if of_head else (hidden,)
        gradients = torch.autograd.grad(out.logprobs, inputs, factor)
        assert gradients[0][0, 1].isnan().all() == spoilt
        assert gradients[0][1:].isfinite().all()
        assert all(x.isfinite().all() != spoilt for x in gradients[1:])


def test_ways_to_build_a_sampling_mask() -> None:
    lists = [[7, 2, 7], [], [0]]
    built = [
        SamplingMask.from_lists(lists),
        SamplingMask.from_padded(torch.tensor([[7, 2, 7], [-1, -1, -1], [-1, 0, -1]])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]), torch.tensor([0, 3, 3, 4])),
        SamplingMask.from_csr(torch.tensor([7, 2, 7, 0]).int(), torch.tensor([0, 3, 3, 4]).int()),
    ]
    for mask in built:
        assert mask.indices.tolist() == [2, 7, 0] and mask.indices.dtype == torch.int64
        assert mask.offsets.tolist() == mask.bounds.tolist() == [0, 2, 2, 3]
        assert (mask.num_rows, mask.max_id, mask.rows.tolist()) == (3, 7, [0, 0, 2])
    empty = SamplingMask.from_lists([[], []])
    assert empty.num_rows == 2 and empty.indices.numel() == 0


@pytest.mark.parametrize("scaling", (1.0, -0.5))
def test_joined_adapters_are_their_sum(scaling: float) -> None:
    first, second = (
        HeadLoRA(
            a=torch.randn(rank, 6, requires_grad=True),
            b=torch.randn(9, rank, requires_grad=True),
            scaling=each,
        )
        for rank, each in ((2, 0.75), (5, scaling))
    )
    joined = HeadLoRA.joined([first, second])
    assert joined is not None and joined.rank == 7
    expected = sum(one.scaling * one.b @ one.a for one in (first, second))
    torch.testing.assert_close(joined.scaling * joined.b @ joined.a, expected)
    assert joined.a.requires_grad and joined.b.requires_grad
    assert HeadLoRA.joined([first]) is first and HeadLoRA.joined([]) is None


# --- a loss


@pytest.mark.parametrize(
    "schedule,changed",
    [
        ("one_pass", "target"),
        ("one_pass", "advantages"),
        ("one_pass", "old_logprobs"),
        ("two_pass", "target"),
    ],
)
def test_a_batch_changed_before_a_recompute_is_an_error(schedule: str, changed: str) -> None:
    problem = make_problem(dtype=torch.float32)
    batch, config = problem.batch(), make_config("dapo")
    out = linear_policy_loss(problem.hidden, problem.weight, batch, config, schedule=schedule)
    out.loss.backward(retain_graph=True)
    getattr(batch, changed).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_fp16_gradients_survive_a_tiny_loss() -> None:
    """Weights of 1e-6 would underflow as fp16 logit gradients; GradScaler comes after the op."""
    problem, config = make_problem(), make_config("dapo")
    tiny, scale = problem.batch(num_items_in_batch=1e6), 2.0**20
    exact = run(problem, config, tiny, scale=scale, backend="reference")
    for schedule in ("one_pass", "two_pass"):
        half = problem.to("cpu", torch.float16)
        got = run(half, config, tiny, scale=scale, schedule=schedule)
        for name in ("dhidden", "dweight", "dbias"):
            assert relative_error(got[name], exact[name]) < 2e-3, name


def test_a_metric_that_is_not_there_is_answered_by_those_that_are() -> None:
    batch = TokenBatch.from_padded(torch.tensor([[1, 2]]), torch.ones(1))
    hidden, weight = torch.randn(1, 2, 4), torch.randn(9, 4)
    metrics = linear_policy_loss(hidden, weight, batch, LossConfig()).metrics
    with pytest.raises(KeyError, match=r"clipped: expected one of entropy, .*clip_ratio/"):
        metrics["clipped"]


# --- a divergence


def divergence_case(**more: Any) -> Case:
    return Case(**dict(divergence="forward_kl", lengths=(21,), packed=True, vocab=67) | more)


@backends
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_tail_far_below(kind: str, backend: str) -> None:
    """An id that is 90 logits above the others, and in the teacher's list."""
    case = divergence_case(divergence=kind, backend=backend, top_k=3, bias=True)
    problem = problem_of(case)
    problem.leaves["bias"][3] += 90
    problem.teacher["topk_indices"][:] = torch.tensor([3, 10, 20])
    Judge(case, problem).judge(product.run(case, problem))


@pytest.mark.parametrize("top_k", (0, 5))
@pytest.mark.parametrize("softcap", (None, 5.0))
@backends
def test_a_row_without_weight_may_be_no_number(
    backend: str, softcap: float | None, top_k: int
) -> None:
    case = divergence_case(
        backend=backend, softcap=softcap, top_k=top_k, advantages="token", trained="hidden"
    )
    problem = problem_of(case)
    problem.advantages[4] = 0
    expected = product.run(case, problem).gradients["hidden"]
    problem.leaves["hidden"][4] = torch.nan
    got = product.run(case, problem).gradients["hidden"]
    assert torch.equal(got, expected) and not expected[4].any()


def test_a_chunk_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory once, the call goes through with smaller tiles, and says what to set."""
    case = divergence_case(backend="chunked", tile_rows=16)
    problem, divergence_sums = problem_of(case), torch_backend.Backend.divergence_sums
    expected = product.run(case, problem).all()

    def fails_at_first(self: Any, pair: Any, divergence: Any) -> Tensor:
        if len(pair.lse) > 8:
            raise torch.OutOfMemoryError("of the test")
        return divergence_sums(self, pair, divergence)

    monkeypatch.setattr(torch_backend.Backend, "divergence_sums", fails_at_first)
    with pytest.warns(RuntimeWarning, match=r"out of memory: attempt 2.*max_workspace_bytes="):
        got = product.run(case, problem).all()
    for name, value in got.items():
        torch.testing.assert_close(value, expected[name])


def models() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the leaves of a student, and a teacher's tensors."""
    problem = problem_of(divergence_case(lengths=(20,))).posed(("hidden", "weight"))
    return problem.leaves, {f"teacher_{n}": x for n, x in problem.teacher.items()}


def test_a_weight_changed_before_a_backward_is_an_error() -> None:
    leaves, teacher = models()
    out = linear_divergence(
        leaves["hidden"], leaves["weight"], teacher["teacher_hidden"], teacher["teacher_weight"]
    )
    with torch.no_grad():
        leaves["weight"] += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.loss.backward()


def test_layouts_paddings_and_compile() -> None:
    leaves, teacher = models()
    hidden, weight = leaves["hidden"], leaves["weight"]
    of_teacher, head = teacher["teacher_hidden"], teacher["teacher_weight"]
    flat = linear_divergence(hidden, weight, of_teacher, head)
    batch = linear_divergence(hidden.view(4, 5, -1), weight, of_teacher.view(4, 5, -1), head)
    assert torch.equal(batch.divergence.view(-1), flat.divergence)
    padded = torch.cat([head, torch.full((5, head.shape[1]), 9.0)])
    within = linear_divergence(hidden, weight, of_teacher, padded, vocab_size=len(head))
    assert torch.equal(within.divergence, flat.divergence)
    compiled = torch.compile(lambda x: linear_divergence(x, weight, of_teacher, head).loss * 2)
    assert torch.equal(compiled(hidden), flat.loss * 2)


def test_no_rows() -> None:
    case = divergence_case()
    for changed in (replace(case, lengths=(0,)), replace(case, masked=True)):
        problem = problem_of(changed)
        problem.mask.zero_()
        problem = replace(problem, keep=problem.mask)
        got = product.run(changed, problem)
        assert got.values["loss"] == 0 and not got.gradients["weight"].any()


def test_explain() -> None:
    leaves, teacher = models()
    student = leaves["hidden"], leaves["weight"]
    plan = explain_divergence(
        *student, teacher["teacher_hidden"], teacher["teacher_weight"], kind="jsd",
        backend="chunked",
    )  # fmt: skip
    assert "student   3 GEMMs in one pass" in str(plan) and "teacher   1, logits tile" in str(plan)
    assert "Divergence(kind='jsd', beta=0.5)" in plan.fingerprint
    assert "teacher   none" in str(explain_divergence(*student))
