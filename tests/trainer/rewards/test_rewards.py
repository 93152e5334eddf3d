from __future__ import annotations

import asyncio
import functools
import math
import re
import sys
import threading
import time

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from grpo_trainer.rewards import RewardLog, resolve_rewards, score


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
    assert call(lambda **kwargs: [np.bool_(True), np.float32(3)]).tolist() == [[1.0], [3.0]]
    assert call(lambda **kwargs: [math.nan, 1])[:, 0].isnan().tolist() == [True, False]


def test_what_the_functions_said_of_unscored_completions(caplog):
    def none(completions, **kwargs):
        return [None, None, 1.0, None]

    def nan(completions, **kwargs):
        return torch.tensor([math.nan, math.nan, math.nan, 0.0])

    call([none, nan], count=4)
    [warning] = caplog.messages
    assert "'none' returned None, 'nan' returned NaN for 2 of 4 completions" in warning


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

    def slow_itself(completions, **kwargs):
        time.sleep(0.2)
        return [0.0] * len(completions)

    start = time.perf_counter()
    rewards = call([slow, slow_itself, Slow()])
    assert rewards.tolist() == [[1.0, 0.0, 1.0]] * 2
    assert time.perf_counter() - start < 0.39


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "'bad': expected 2 rewards, one per completion, got 1"),
        (3.0, "'bad': expected a list of 2 numbers, got float"),
        (None, "'bad': expected a list of 2 numbers, got NoneType"),
        (["1", "2"], "'bad': expected numbers or None, got str"),
        ([1.0, -math.inf], "'bad': expected finite numbers .* got -inf"),
        ([1.0, 1e39], r"'bad': expected finite numbers up to 3.4e\+38, got 1e\+39"),
        ([1.0, -(10**5000)], "'bad': expected finite numbers up to .*, got a larger int"),
        (torch.ones(2, 1), "'bad': expected numbers or None, got list"),
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


def test_exceptions_name_the_function_and_what_it_was_called_with():
    def broken(**kwargs):
        raise KeyError("x")

    async def broken_later(**kwargs):
        raise KeyError("x")

    for function in (broken, broken_later):
        with pytest.raises(RuntimeError, match=f"'{function.__name__}' raised KeyError") as error:
            call(function, prompts=["1 + 1 =", "p"], completions=["2" * 999, "c"])
        assert isinstance(error.value.__cause__, KeyError)
        assert "2 completions, the first of them: prompt '1 + 1 =', completion '222" in str(
            error.value
        )
        assert len(str(error.value)) < 600


def test_a_function_that_does_not_take_what_it_is_called_with():
    def narrow(completions):
        return [0.0] * len(completions)

    async def narrow_later(completions):
        return [0.0] * len(completions)

    def broken(**kwargs):
        raise TypeError("of its own")

    for function in (narrow, narrow_later):
        with pytest.raises(RuntimeError, match=r"take \*\*kwargs, or each of prompts, comp"):
            call(function)
    with pytest.raises(RuntimeError) as error:
        call(broken)
    assert "kwargs" not in str(error.value)


def test_a_failure_stops_the_others():
    cancelled = threading.Event()

    async def endless(**kwargs):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    def broken(**kwargs):
        time.sleep(0.05)  # the other has begun
        raise KeyError("x")

    async def broken_later(**kwargs):
        broken()

    for function in (broken, broken_later):
        cancelled.clear()
        with pytest.raises(RuntimeError, match=function.__name__):
            call([endless, function])
        assert cancelled.wait(5)


def test_async_functions_below_a_running_loop():
    async def notebook():
        return call(one)

    async def one(completions, **kwargs):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    assert asyncio.run(notebook()).tolist() == [[1.0], [1.0]]


def test_async_functions_keep_their_loop():
    loops = []

    async def keeps(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    call(keeps)
    call([keeps, keeps])
    assert len(loops) == 3 and len(set(loops)) == 1 and not loops[0].is_closed()


def test_names():
    def reward(**kwargs):
        return []

    def other(**kwargs):
        return []

    other.__name__ = "reward_2"
    functions = [reward, functools.partial(reward, x=1), other, "think_format_reward"]
    names = [item.name for item in resolve_rewards(functions)]
    assert names == ["reward", "reward_2", "reward_2_2", "think_format_reward"]


def test_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text("def one(**kwargs):\n    return [1, 1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert call("my_rewards_module.one").tolist() == [[1.0], [1.0]]
    with pytest.raises(ValueError, match="has no 'two'$"):
        resolve_rewards("my_rewards_module.two")
    with pytest.raises(ValueError, match=r"has no 'onee' \(is it one\?\)"):
        resolve_rewards("my_rewards_module.onee")
    sys.modules.pop("my_rewards_module")


@pytest.mark.parametrize(
    "source",
    ["no_such_reward", "no_such_module.reward", "math.pi", [], [3], "./no_such_folder", "no/model"],
)
def test_unknown(source):
    with pytest.raises(ValueError, match="reward_funcs"):
        resolve_rewards(source)


def test_a_built_in_that_is_misspelled():
    with pytest.raises(ValueError, match=r"got 'acuracy_reward' \(is it accuracy_reward\?\)"):
        resolve_rewards("acuracy_reward")


def test_factories_with_settings(tmp_path, monkeypatch):
    reward = "get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)"
    [resolved] = resolve_rewards(reward)
    assert resolved.name == "soft_overlong_punishment_reward"
    (tmp_path / "my_factories_module.py").write_text(
        "def make(*, scale, words=()):\n"
        "    def scaled(completions, **kwargs):\n"
        "        return [scale * sum(word in text for word in words) for text in completions]\n"
        "    return scaled\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert call("my_factories_module.make(scale=0.5, words=['c'])").tolist() == [[0.5], [0.5]]
    sys.modules.pop("my_factories_module")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("get_soft_overlong_punishment", "settings as in get_soft_overlong_punishment"),
        ("get_soft_overlong_punishment()", "'max_completion_len'"),
        ("get_repetition_penalty_reward(size=3)", "'size'"),
        ("get_repetition_penalty_reward(3)", "name(key=value, ...)"),
        ("get_repetition_penalty_reward(ngram_size=len)", "name(key=value, ...)"),
        ("get_repetition_penalty_reward(ngram_size=0)", "ngram_size: expected an integer >= 1"),
        ("get_repetition_penalty_reward(ngram_size=", "an import path"),
        ("think format()", "name(key=value, ...)"),
    ],
)
def test_wrong_settings(source, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_rewards(source)


def test_what_rewards_log():
    log = RewardLog(2)

    def logs(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(text) for text in completions])
        for value in (1, np.float32(2), torch.tensor(6.0)):
            log_metric("seen", value)
        return [0.0, 0.0]

    call(logs, log_extra=log.log_extra, log_metric=log.log_metric)
    assert log.columns == {"length": [1, 1]}
    assert float(log.metrics(Accelerator(cpu=True))["seen"]) == 3.0
    with pytest.raises(ValueError, match="expected 2 values of 'x', one per completion, got 1"):
        log.log_extra("x", [1])
    with pytest.raises(ValueError, match="'reward', which exists"):
        log.log_extra("reward", [1, 2])
    with pytest.raises(ValueError, match="finite number for 'y', got nan"):
        log.log_metric("y", math.nan)
    with pytest.raises(ValueError, match="finite number for 'y', got 1000"):
        log.log_metric("y", 10**400)
