"""Built-in rewards: hand-computed values, and TRL's where it is installed."""

from __future__ import annotations

import importlib.util
import math
import sys

import pytest

from grpo_trainer import rewards
from grpo_trainer.rewards import (
    accuracy_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    resolve_rewards,
    think_format_reward,
)

WITH_MATH_VERIFY = importlib.util.find_spec("math_verify") is not None
needs_math_verify = pytest.mark.skipif(not WITH_MATH_VERIFY, reason="math-verify not installed")

TEXTS = [
    "<think>a</think>b",
    "<think>\n</think>\n\\boxed{2}",
    "a",
    " <think>a</think>",
    "<think>a<think></think>",
    "<think>a</think><think>b</think>",
    "",
]


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def trl_rewards():
    return pytest.importorskip("trl.rewards")


def test_think_format():
    expected = [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert think_format_reward(TEXTS) == expected
    assert think_format_reward(messages(TEXTS)) == expected
    told = [{"content": "b", "reasoning_content": "a"}, {"content": "", "reasoning_content": "a"}]
    assert think_format_reward([[message] for message in told]) == [1.0, 0.0]
    assert trl_rewards().think_format_reward(messages(TEXTS)) == expected


@pytest.mark.parametrize(("limit", "cache"), [(10, 4), (10, 10), (10, 0), (1, 1)])
def test_soft_overlong_punishment(limit, cache):
    ids = [[1] * length for length in range(13)]
    given = get_soft_overlong_punishment(limit, cache)(completion_ids=ids)
    assert given == trl_rewards().get_soft_overlong_punishment(limit, cache)(ids)
    if (limit, cache) == (10, 4):
        assert given[5:] == [0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0, -1.0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_repetition_penalty(size):
    ids = [[1, 2, 3, 4], [5, 5, 5, 5, 5], [1, 2, 1, 2, 1], [1], []]
    given = get_repetition_penalty_reward(size, -2.0)(completion_ids=ids)
    theirs = trl_rewards().get_repetition_penalty_reward(size, -2.0)(ids)
    assert given == pytest.approx(theirs, abs=1e-12)
    if size == 2:
        assert given == [0.0, -1.5, -1.0, 0.0, 0.0]


@pytest.mark.parametrize("source", ["get_cosine_scaled_reward(max_len=9)", accuracy_reward])
def test_without_math_verify(source, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"math-verify.*pip install 'math-verify>=0.8'"):
        resolve_rewards(source)


@needs_math_verify
def test_accuracy():
    solutions = [r"\frac{1}{3}", r"$\frac{1}{3}$", "$2$", "no formula"]
    texts = [
        r"My answer is \boxed{\frac{1}{3}}",
        r"The final answer is $\frac{2}{6}$",
        r"\boxed{3}",
        r"\boxed{3}",
    ]
    logged = {}
    given = accuracy_reward(messages(texts), solutions, log_extra=logged.__setitem__)
    assert given == accuracy_reward(texts, solutions)
    assert given == [1.0, 1.0, 0.0, None]
    assert logged["solution"] == solutions
    assert logged["answer_parsed"][3] == "[skipped]" and len(logged["gold_parsed"]) == 4
    theirs = trl_rewards()
    assert given == theirs.accuracy_reward(messages(texts), solutions)
    ids = [[1] * length for length in (1, 20, 33, 4)]
    ours = rewards.get_cosine_scaled_reward(30)(messages(texts), solutions, ids)
    assert ours == pytest.approx(
        theirs.get_cosine_scaled_reward(30)(messages(texts), solutions, ids)
    )
    assert math.isclose(ours[2], -0.5)
    assert "math_verify" in sys.modules


@needs_math_verify
@pytest.mark.parametrize("ends", [None, ["</think>"], ["</a>", "</b>"]])
def test_accuracy_of_the_answer_behind_the_reasoning(ends):
    texts = [
        r"<think>\boxed{2}</think> \boxed{3}",
        r"<think>\boxed{3}</think> \boxed{2}",
        r"<think>\boxed{3}",
        r"<think>1</think> \boxed{2} </think> \boxed{3}",
        r"1</b> \boxed{2} </a> \boxed{3}",
        r"<think>1</think> </b> \boxed{3}",
        "",
    ]
    solutions = ["$3$"] * 5 + ["no formula"] * 2
    columns = {}, {}
    given, theirs = (
        function(messages(texts), solutions, ends, log_extra=logged.__setitem__)
        for function, logged in zip(
            (reasoning_accuracy_reward, trl_rewards().reasoning_accuracy_reward),
            columns,
            strict=True,
        )
    )
    assert given == theirs and columns[0] == columns[1]
    assert given == reasoning_accuracy_reward(texts, solutions, ends)
    assert {1.0, 0.0, None} == set(given)
    if ends != ["</a>", "</b>"]:
        assert given == [1.0, 0.0, 0.0, 1.0, 0.0, None, 0.0]
    told = {"role": "assistant", "reasoning_content": r"\boxed{2}", "content": r"\boxed{3}"}
    assert reasoning_accuracy_reward([[told]], ["$3$"], ends) == [1.0]
