from __future__ import annotations

import asyncio
import functools
import sys
import time

import pytest
import torch

from grpo_trainer.rewards import resolve_rewards, score


def call(function, count=2, **columns):
    arguments = {"prompts": ["p"] * count, "completions": ["c"] * count} | columns
    return score(resolve_rewards(function), count, arguments)


def test_values_and_none():
    def halves(completions, **kwargs):
        return [0.5, None]

    assert call(halves)[0, 0] == 0.5
    assert call(halves)[1, 0].isnan()
    assert call(lambda **kwargs: torch.tensor([1.0, 2.0])).tolist() == [[1.0], [2.0]]
    assert call(lambda **kwargs: [True, torch.tensor(3)]).tolist() == [[1.0], [3.0]]


def test_columns_arrive():
    def matches(prompts, completions, answer, **kwargs):
        return [float(item) for item in answer]

    assert call(matches, answer=["1", "2"]).tolist() == [[1.0], [2.0]]


def test_async_functions_run_together():
    async def slow(completions, **kwargs):
        await asyncio.sleep(0.2)
        return [1.0] * len(completions)

    class Slow:
        async def __call__(self, completions, **kwargs):
            return await slow(completions)

    start = time.perf_counter()
    rewards = call([slow, lambda **kwargs: [0.0, 0.0], Slow()])
    assert rewards.tolist() == [[1.0, 0.0, 1.0]] * 2
    assert time.perf_counter() - start < 0.39


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "'bad': expected 2 rewards, one per completion, got 1"),
        (3.0, "'bad': expected a list of 2 numbers, got float"),
        (None, "'bad': expected a list of 2 numbers, got NoneType"),
        (["1", "2"], "'bad': expected numbers or None, got str"),
    ],
)
def test_wrong_answers(answer, message):
    def bad(**kwargs):
        return answer

    async def bad_later(**kwargs):
        return answer

    bad_later.__name__ = "bad"
    for function in (bad, bad_later):
        with pytest.raises(ValueError, match=message):
            call(function)


def test_exceptions_name_the_function():
    def broken(**kwargs):
        raise KeyError("x")

    async def broken_later(**kwargs):
        raise KeyError("x")

    with pytest.raises(RuntimeError, match="'broken' raised KeyError"):
        call(broken)
    with pytest.raises(RuntimeError, match="'broken_later' raised KeyError"):
        call(broken_later)


def test_names():
    def reward(**kwargs):
        return []

    functions = [reward, functools.partial(reward, x=1), "think_format_reward"]
    names = [item.name for item in resolve_rewards(functions)]
    assert names == ["reward", "reward_2", "think_format_reward"]


def test_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text("def one(**kwargs):\n    return [1, 1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert call("my_rewards_module.one").tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="has no 'two'"):
        resolve_rewards("my_rewards_module.two")
    sys.modules.pop("my_rewards_module")


@pytest.mark.parametrize("source", ["no_such_reward", "no_such_module.reward", [], [3]])
def test_unknown(source):
    with pytest.raises(ValueError, match="reward_funcs"):
        resolve_rewards(source)


def test_think_format():
    texts = ["<think>a</think>b", "a", "<think>a<think></think>", [{"content": "<think></think>"}]]
    rewards = score(resolve_rewards("think_format_reward"), 4, {"completions": texts})
    assert rewards.flatten().tolist() == [1.0, 0.0, 0.0, 1.0]
