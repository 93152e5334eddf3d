"""The search for the longest sequence that fits."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.check import take_gradient
from benchmarks.providers import PROVIDERS
from benchmarks.test_vocabulary import CASES, Policy, longest, make_model
from grpo_kernels import policy_loss


@pytest.mark.parametrize("room", (0, 15, 16, 17, 40, 79, 80, 1000))
def test_the_longest_sequence_is_found(room: int) -> None:
    tried = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= room

    low, high = longest(fits, 16, 80, math.inf)
    assert low == min(room, 80) // 16 * 16
    assert high == (low + 16 if low < 80 else None)
    assert len(tried) == len(set(tried)) <= 3 and all(0 < n <= 80 for n in tried)


def test_a_search_whose_time_is_up_says_what_it_knows() -> None:
    assert longest(lambda tokens: pytest.fail("too late"), 16, 64, -math.inf) == (0, None)


def test_out_of_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(CASES["tiny"][0], "cpu")
    assert policy.fits("eager", 16)

    def exhausted(name: str, tokens: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(policy, "step", exhausted)
    assert not policy.fits("eager", 16)


def test_the_gradients_are_those_of_the_whole_model() -> None:
    """By transformers' own forward, and autograd through all of it."""
    policy = Policy(CASES["tiny"][0], "cpu")
    problem = policy.off_policy()
    found, gradient = policy.result(PROVIDERS["eager"].run, problem)
    model = make_model(policy.case, "cpu")
    logits = model(input_ids=problem.target.roll(1, dims=1)).logits
    logprobs = logits.log_softmax(-1).gather(-1, problem.target[..., None])[..., 0]
    loss = policy_loss(logprobs.flatten(), problem.batch(), problem.loss).loss
    loss.backward()
    torch.testing.assert_close(found, loss.detach())
    torch.testing.assert_close(gradient, take_gradient(model.parameters()), rtol=1e-4, atol=1e-6)
