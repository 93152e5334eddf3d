"""One environment per completion: its prompt, its tools, its reward."""

from __future__ import annotations

import threading

import pytest
from datasets import Dataset

from grpo_trainer.agents import Environments, make_toolbox
from tests.support.tools import (
    Play,
    add,
    answers,
    call,
    make_trainer,
    once,
    question,
    results,
    then,
)


class Counter:
    """Counts up from what its row says."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self._value = 0

    def reset(self, start: int = 0, **row: object) -> str | None:
        assert "prompt" in row
        self._value = start
        return f" at {start}" if start else None

    def step(self, by: int) -> int:
        """Count.

        Args:
            by: how far.
        """
        self._value += by
        return self._value

    def get_reward(self) -> float:
        return float(self._value)

    @property
    def broken(self) -> int:
        raise AssertionError("properties are not read")


class Lamp:
    def reset(self, **row: object) -> None:
        self._on = False

    async def switch(self) -> str:
        """Switch."""
        self._on = not self._on
        return "on" if self._on else "off"


class JudgedLamp(Lamp):
    async def get_reward(self) -> float:
        return float(self._on)


def step_script(text: str) -> str:
    """Return two steps, as wide as the number in the prompt."""
    if len(results(text)) == 2:
        return "end"
    return call("step", by=int(text.split("at ")[1][0]) if "at " in text else 1)


def test_each_completion_has_its_own():
    """Of the kind that its row names, with that kind's tools; a text of reset ends the prompt."""

    def script(text):
        return (
            step_script(text) if "step" in text.split("<|end|>")[0] else once(call("switch"))(text)
        )

    Counter.made = 0
    play = Play(script, environments={"count": Counter, "lamp": JudgedLamp})
    rows = [{"prompt": question(), "environment": "count", "start": start} for start in (3, 3, 0)]
    sampled = play(*rows, {"prompt": question(), "environment": "lamp"})
    environments = [rollout.inputs["environments"] for rollout in sampled.samples]
    assert [type(one) for one in environments] == [Counter] * 3 + [JudgedLamp]
    assert len(set(map(id, environments))) == 4
    found = [answers(rollout) for rollout in sampled.samples]
    assert found == [["6", "9"], ["6", "9"], ["1", "2"], ["on"]]
    contents = [rollout.prompt[-1]["content"] for rollout in sampled.samples]
    assert contents == ["q at 3", "q at 3", "q", "q"]
    assert rows[0]["prompt"] == question()  # the dataset's row is as it was
    texts = [play.text(rollout.prompt_ids).split("<|end|>")[0] for rollout in sampled.samples]
    assert texts == ["<|start|>tadd step "] * 3 + ["<|start|>tadd switch "]
    count, lamp = play.environments.rewards
    assert [(one.name, one.is_async) for one in (count, lamp)] == [
        ("Counter", False), ("JudgedLamp", True),
    ]  # fmt: skip
    assert count.function(environments=environments[:3]) == [9.0, 9.0, 2.0]
    # those that were scored are used again
    with play.environments.scoring(sampled.samples):
        assert play.environments.scored == environments
    again = play(*rows[:2]).samples
    assert [rollout.inputs["environments"] for rollout in again] == environments[:2]
    assert Counter.made == 3
    with pytest.raises(ValueError, match="environment: expected one of count, lamp .* got 'x'"):
        play({"prompt": question(), "environment": "x"})


def test_what_hangs_in_an_environment_stays_in_it():
    release = threading.Event()

    class Hangs:
        def reset(self, **row: object) -> None: ...

        def wait(self) -> None:
            """Block forever."""
            release.wait()

    play = Play(then(call("wait"), "end"), environments=Hangs, tool_timeout=0.05)
    try:
        played = [play().samples for _ in range(2)]
        first, second = (one.inputs["environments"] for [one] in played)
    finally:
        release.set()
    assert first is not second


class NoReset:
    def step(self) -> None:
        """Step."""


class AsyncReset:
    async def reset(self, **row: object) -> None: ...


class NoDocstring:
    def reset(self, **row: object) -> None: ...

    def step(self, by: int) -> None: ...


class Adds(Lamp):
    def add(self) -> None:
        """Have the name of a tool."""


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (NoReset, r"with a plain method reset\(\*\*row\), got NoReset without"),
        (AsyncReset, "got AsyncReset without"),
        (NoDocstring, "NoDocstring: expected type hints for all arguments of 'step'"),
        (Adds, "method names that differ from tools' names, got 'add' twice"),
        (3, "expected a function or a class, got 3"),
        ({"one": NoReset}, "got NoReset without"),
    ],
)
def test_wrong_environments(factory, message):
    with pytest.raises(ValueError, match=f"environment_factory: .*{message}"):
        Environments(factory, make_toolbox([add]))


@pytest.mark.parametrize(
    ("prompt", "what", "message"),
    [
        (question(), 3, "Shows.reset: expected text, a list of .* got 3"),
        (question(), ["text"], r"Shows.reset: expected text, a list of .* got \['text'\]"),
        (question(), [{"text": "x"}], r"Shows.reset: expected text, a list of .* got \[{'text'"),
        *(
            (prompt, "more", "prompt: expected messages, the last one with a content")
            for prompt in ("text", [{"role": "user"}], [{"role": "user", "content": ["text"]}])
        ),
    ],
)
def test_wrong_observations(prompt, what, message):
    with pytest.raises(ValueError, match=message):
        Play(then(""), environments=Shows)({"prompt": prompt, "what": what})


class Shows(Lamp):
    def reset(self, what: object, **row: object) -> object:
        return what


class Sums:
    """Says all of the prompt."""

    def reset(self, number: int = 7, prompt: object = None) -> str:
        assert prompt is None or prompt == [{"role": "user", "content": ""}]
        self.number = number
        return f"double {number}"

    def get_reward(self) -> float:
        return float(self.number)


@pytest.mark.parametrize(
    ("rows", "number"), [(None, 7), (Dataset.from_list([{"number": 5}] * 4), 5)]
)
def test_prompts_by_the_environment_alone(make_args, rows, number):
    seen = []
    trainer = make_trainer(
        make_args(max_completion_length=300, max_steps=1, per_device_train_batch_size=8),
        rows,
        lambda text: "end",
        lambda prompts, **_: [float(bool(seen.append(prompt))) for prompt in prompts],
        environment_factory=Sums,
    )
    trainer.train()
    assert [type(one) for one in trainer.environments] == [Sums] * 8 and trainer.tools == []
    assert seen == [[{"role": "user", "content": f"double {number}"}]] * 8
    assert trainer.state.log_history[0]["rewards/Sums/mean"] == number


NUMBERS = Dataset.from_list([{"number": 5}])


@pytest.mark.parametrize(
    ("rows", "factory", "changes", "message"),
    [
        (None, Sums, {"max_steps": -1}, "train_dataset: expected prompts to train on"),
        (None, {"sums": Sums}, {}, "train_dataset: expected prompts to train on"),
        (None, Sums, {"reward_weights": [1.0, 2.0]}, "reward_weights: expected 1"),
        (NUMBERS, Sums, {"remove_unused_columns": True}, "train_dataset: expected a `prompt` col"),
        (NUMBERS, Sums, {"dynamic_prompts_fn": print}, "train_dataset: expected a `prompt` column"),
        (Dataset.from_list([{"prompt": question()}]), Lamp, {}, "reward_funcs: expected at least"),
    ],
)
def test_where_environments_lack_something(make_args, rows, factory, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(make_args(**changes), rows, environment_factory=factory).train()
