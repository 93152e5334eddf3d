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
from datasets import Dataset

from grpo_trainer.rewards import RewardError, RewardLog, resolve_rewards, score, text_of
from tests.support.trainer import MuteError


def call(function, count=2, **columns):
    arguments = {"prompts": ["p"] * count, "completions": ["c"] * count} | columns
    return score(resolve_rewards(function), count, arguments)


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        ([0.5, None], [0.5, math.nan]),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        ([True, torch.tensor(3)], [1.0, 3.0]),
        ([np.bool_(True), np.float32(3)], [1.0, 3.0]),
        ([math.nan, 1], [math.nan, 1.0]),
    ],
)
def test_values_and_none(answer, rewards):
    found = call(lambda **kwargs: answer)
    torch.testing.assert_close(found, torch.tensor(rewards)[:, None].to(found), equal_nan=True)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["text", "messages"])
def test_every_column_of_a_row_arrives(make_trainer, chat_tokenizer, kind, streaming):
    """Beside its completions, in training and in evaluation; none shares its values with others."""
    texts = [f"{n}7=" for n in range(5)]
    asked = [
        {"text": text, "messages": [{"role": "user", "content": text}]}[kind] for text in texts
    ]
    rows = [{"prompt": p, "number": n, "notes": {"words": [n]}} for n, p in enumerate(asked)]
    calls = []

    def reward(prompts, completions, completion_ids, number, notes, trainer_state, **others):
        assert {"log_extra", "log_metric"} <= set(others)
        assert prompts == [asked[n] for n in number]
        found = [c if kind == "text" else c[0]["content"] for c in completions]
        assert kind == "text" or completions[0][0]["role"] == "assistant"
        decoded = [chat_tokenizer.decode(ids) for ids in completion_ids]
        assert found == [text.removesuffix("<eos>") for text in decoded]
        for note in notes:
            note["words"].append("edited")
        assert notes == [{"words": [n, "edited"]} for n in number]
        calls.append((trainer_state.global_step, number))
        return [float(n) for n in number]

    data = Dataset.from_list(rows)
    data = data.to_iterable_dataset() if streaming else data
    make_trainer(
        reward, train_dataset=data, eval_dataset=data, num_generations=2, max_steps=3,
        eval_strategy="steps", eval_steps=3, num_generations_eval=1, shuffle_dataset=False,
    ).train()  # fmt: skip
    # the last prompt fills no batch of the dataset's; a stream has no end
    third = [4, 4, 0, 0] if streaming else [0, 0, 1, 1]
    steps = [(0, [0, 0, 1, 1]), (1, [2, 2, 3, 3]), (2, third), (3, [0, 1, 2, 3]), (3, [4])]
    assert calls == steps


def test_functions_run_together():
    """Plain ones and coroutines; these in one event loop, also where another runs already."""
    both, loops = [threading.Barrier(3, timeout=30), []]

    async def later(completions, **kwargs):
        loops.append(asyncio.get_running_loop())
        await asyncio.to_thread(both.wait)
        return [1.0] * len(completions)

    class Later:
        async def __call__(self, completions, **kwargs):
            return await later(completions)

    def itself(completions, **kwargs):
        both.wait()
        return [0.0] * len(completions)

    async def notebook():
        return call([later, itself, Later()])

    for rewards in (call([later, itself, Later()]), asyncio.run(notebook())):
        assert rewards.tolist() == [[1.0, 0.0, 1.0]] * 2
    assert len(loops) == 4 and len(set(loops)) == 1 and not loops[0].is_closed()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0], "2 rewards, .* got 1"),
        (3.0, "a list of 2 numbers, got float"),
        (None, "a list of 2 numbers, got NoneType"),
        (["1", "2"], "numbers or None, got str"),
        ([1.0, -math.inf], "finite numbers .* got -inf"),
        ([1.0, 1e31], r"finite numbers up to 1e\+30, got 1e\+31"),
        ([1.0, -(10**5000)], "finite numbers .* got a larger int"),
        (torch.ones(2, 1), "numbers or None, got list"),
    ],
)
def test_wrong_answers(answer, message):
    def bad(**kwargs):
        return answer

    async def bad_later(**kwargs):
        return answer

    for function in (bad, bad_later):
        with pytest.raises(ValueError, match=f"'{function.__name__}': expected {message}"):
            call(function)


def raises(error):
    def broken(**kwargs):
        raise error

    return broken


def narrow(completions):
    return [0.0] * len(completions)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    ("function", "said", "unsaid"),
    [
        (raises(KeyError("x")), "'broken' raised KeyError", "take "),
        (raises(TypeError("of its own")), "'broken' raised TypeError", "kwargs"),
        (raises(MuteError()), "'broken' raised MuteError: MuteError; in test_rewards", "take "),
        (narrow, "accept **kwargs, or each of prompts, comp", "raised KeyError"),
    ],
)
def test_exceptions_name_the_function_and_what_it_was_called_with(function, said, unsaid, later):
    async def broken(**columns):
        return function(**columns)

    async def narrow_later(completions):
        return [0.0] * len(completions)

    given = {narrow: narrow_later}.get(function, broken) if later else function
    with pytest.raises(ValueError if function is narrow else RuntimeError) as error:
        call(given, prompts=["1 + 1 =", "p"], completions=["2" * 999, "c"])
    message = str(error.value)
    assert said in message and unsaid not in message and len(message) < 700
    assert isinstance(error.value.__cause__, KeyError | TypeError | MuteError)
    assert "2 completions, the first of them: prompt '1 + 1 =', completion '222" in message


PARTS = [{"type": "image"}, {"type": "text", "text": "ye"}, {"type": "text", "text": "s"}]
TALK = [{"role": "tool", "content": "7"}, {"role": "assistant", "content": "?"}]


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("yes", "yes"),
        (TALK, "?"),
        ([{"role": "assistant", "content": PARTS}], "yes"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], ""),
    ],
)
def test_the_text_of_a_completion(completion, text):
    assert text_of(completion) == text


def test_a_reward_that_takes_messages_for_text_is_told():
    def right(completions, **kwargs):
        return [float(text.strip() == "?") for text in completions]

    assert call(right, completions=["?", "no"]).flatten().tolist() == [1, 0]
    said = (
        r"in test_rewards.py, line \d+; if prompts are messages, .* completion\[-1\]\[\"content\"\]"
    )
    with pytest.raises(RewardError, match=said):
        call(right, completions=[TALK, TALK])
    for other in (raises(OSError("no connection")), narrow):  # for another reason
        with pytest.raises((ValueError, RewardError)) as error:
            call(other, completions=[TALK, TALK])
        assert "text_of" not in str(error.value)


def test_names():
    def reward(**kwargs):
        return []

    def other(**kwargs):
        return []

    other.__name__ = "reward_2"
    functions = [reward, functools.partial(reward, x=1), other, "think_format_reward"]
    names = [item.name for item in resolve_rewards(functions)]
    assert names == ["reward", "reward_2", "reward_2_2", "think_format_reward"]


MODULE = """
def one(**kwargs):
    return [1, 1]

def make(*, scale, words=()):
    def scaled(completions, **kwargs):
        return [scale * sum(word in text for word in words) for text in completions]
    return scaled
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_rewards", None)


def test_import_paths_and_factories_with_settings(own_module):
    assert call("my_rewards.one").tolist() == [[1.0], [1.0]]
    assert call("my_rewards.make(scale=0.5, words=['c'])").tolist() == [[0.5], [0.5]]
    reward = "get_soft_overlong_punishment(max_completion_len=10, soft_punish_cache=4)"
    assert resolve_rewards(reward)[0].name == "soft_overlong_punishment_reward"


NAMED = "name(key=value, ...)"
REPETITION = "get_repetition_penalty_reward"
# what is given as reward_funcs -> what is said of it
ERRORS = [
    *((source, "reward_funcs: expected") for source in ("no_such_reward", "math.pi", [], [3])),
    *((source, "reward_funcs: mod") for source in ("nothing.reward", "no/model", "./nowhere")),
    ("my_rewards.two", "has no 'two'"),
    ("my_rewards.onee", "has no 'onee' (is it one?)"),
    ("acuracy_reward", "got 'acuracy_reward' (is it accuracy_reward?)"),
    ("get_soft_overlong_punishment", "settings of get_soft_overlong_punishment"),
    ("get_soft_overlong_punishment()", "'max_completion_len'"),
    ("get_soft_overlong_punishment(max_completion_len=1, soft_punish_cache=2)", "soft_punish_cach"),
    ("get_cosine_scaled_reward(max_len=0)", "max_len: expected"),
    (f"{REPETITION}(max_penalty=1)", "max_penalty: expected"),
    (f"{REPETITION}(size=3)", "'size'"),
    (f"{REPETITION}(3)", NAMED),
    (f"{REPETITION}(ngram_size=len)", NAMED),
    (f"{REPETITION}(ngram_size=0)", "ngram_size: expected an integer >= 1"),
    (f"{REPETITION}(ngram_size=", "an import path"),
    ("think format()", NAMED),
]


@pytest.mark.parametrize(("source", "message"), ERRORS, ids=str)
def test_what_is_no_reward(own_module, source, message):
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
    for method, given, message in (
        (log.log_extra, ("x", [1]), "expected 2 values of 'x', one per completion, got 1"),
        (log.log_extra, ("reward", [1, 2]), "'reward', which exists"),
        (log.log_metric, ("y", math.nan), "finite number for 'y', got nan"),
        (log.log_metric, ("y", 10**400), "finite number for 'y', got 1000"),
        (log.log_metric, ("kl", 1.0), "a new name, got 'kl'"),
    ):
        with pytest.raises(ValueError, match=message):
            method(*given)


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
