"""Tools, environments and rollout functions that work ahead, each conversation at its own pace."""

from __future__ import annotations

import threading
import time
from itertools import product

import pytest
from datasets import Dataset

from grpo_trainer import GRPOTrainer
from tests.support.threads import rollouts_end
from tests.support.tools import (
    ScriptedEngine,
    call,
    make_small_policy,
    make_tool_tokenizer,
    question,
    results,
)

ROWS = [{"prompt": question(str(n)), "start": n} for n in range(8)]
IN_FLIGHT = [{}, {"max_staleness": 4}]


class Engine(ScriptedEngine):
    """Speaks by a script, and reports log-probabilities and which weights drew a token."""

    updates_in_flight = True
    updates = 0

    async def complete_one(self, prompt_ids, sampling):
        completion = await super().complete_one(prompt_ids, sampling)
        return completion._replace(versions=[self.updates] * len(completion.token_ids))

    def update_weights(self, weights, adapter=False) -> None:
        self.updates += 1


class Counter:
    """Counts from its row's number."""

    made = 0

    def __init__(self) -> None:
        Counter.made += 1

    def reset(self, start: int, **row: object) -> str:
        self.value = start
        return f" at {start}"

    def add(self, a: int, b: int) -> int:
        """Count.

        Args:
            a: one number.
            b: the other.
        """
        self.value += a + b
        return self.value

    def get_reward(self) -> float:
        return float(self.value)


def script(text: str) -> str:
    """Call twice, with the number of the question, and then answer."""
    number = int(text.split("user\n")[1][0])
    return call("add", a=number, b=1) if len(results(text)) < 2 else f"sum {number}"


@pytest.fixture
def make(make_args):
    def run(reward=None, function=None, **changes) -> GRPOTrainer:
        tokenizer = make_tool_tokenizer()
        own = {"tools", "environment_factory", "eval_dataset"} & changes.keys()
        arguments = {name: changes.pop(name) for name in own}
        settings = {
            "generation_batches_ahead": 1, "max_steps": 6, "max_completion_length": 250,
            "per_device_train_batch_size": 8, "num_generations": 4, "shuffle_dataset": False,
        }  # fmt: skip
        return GRPOTrainer(
            make_small_policy(len(tokenizer)), reward, make_args(**settings | changes),
            Dataset.from_list(ROWS), processing_class=tokenizer, rollout_func=function,
            rollout_engine=Engine(tokenizer, script, logprobs=True), **arguments,
        )  # fmt: skip

    return run


def answer_of(ids, completions) -> dict:
    """Return what a function has to."""
    return {
        "prompt_ids": ids, "completion_ids": completions.token_ids,
        "logprobs": completions.logprobs,
    }  # fmt: skip


@pytest.mark.parametrize(("ahead", "changes"), [(0, {}), *product([1, 2], IN_FLIGHT)])
def test_environments(make, ahead, changes):
    """Rewards are those of the completion's own environment, whatever runs at the same time."""
    Counter.made, seen = 0, []

    def agrees(environments, completions, prompts, start, **columns):
        for environment, messages, prompt, first in zip(
            environments, completions, prompts, start, strict=True
        ):
            answers = [one["content"] for one in messages if one["role"] == "tool"]
            assert answers == [str(2 * first + 1), str(3 * first + 2)]
            assert environment.value == 3 * first + 2
            assert prompt[-1]["content"] == f"{first} at {first}"
            seen.append(first)
        return [0.0] * len(environments)

    trainer = make([agrees], environment_factory=Counter, generation_batches_ahead=ahead, **changes)
    trainer.train()
    assert sorted(seen) == sorted([*range(8), *range(4)] * 4)
    assert Counter.made <= 8 * (ahead + 2)  # they are used again
    last = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert last["tools/call_frequency"] == 2 and last["tools/failure_frequency"] == 0
    assert [type(one) for one in trainer.environments] == [Counter] * 8
    assert rollouts_end()


def test_a_slow_conversation_holds_nobody_up(make):
    """The others finish while a tool of the first group does not answer, and take its place."""
    gate, trained = threading.Event(), []

    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one of them.
            b: the other.
        """
        if a == 1 and not gate.wait(60):
            raise TimeoutError
        return a + b

    def reward(prompts, **columns):
        trained.append([prompt[-1]["content"] for prompt in prompts[::4]])
        if len(trained) == 3:
            gate.set()
        return [float(i) for i in range(len(prompts))]

    trainer = make(reward, tools=[add], generation_batches_ahead=2, max_staleness=8)
    trainer.train()
    assert all("1" not in step for step in trained[:3])
    assert sum(step.count("1") for step in trained) == 2  # the dataset has it twice in six steps
    assert rollouts_end()


@pytest.mark.parametrize("changes", IN_FLIGHT)
def test_a_function(make, changes):
    """It runs on another thread, and samples by the weights that the engine has."""
    threads, updates = set(), []

    def rollout(prompts, trainer):
        threads.add(threading.current_thread().name)
        before = trainer.rollouts.engine.updates
        texts = [f"<|start|>user\n{prompt[-1]['content']}" for prompt in prompts]
        ids = [trainer.processing_class.encode(text) for text in texts]
        completions = trainer.rollouts.generate(ids)
        updates.append((before, trainer.rollouts.engine.updates))
        return answer_of(ids, completions) | {
            "rollout_versions": completions.versions if changes else None,
            "size": [len(prompts)] * len(prompts),
        }

    def reward(completion_ids, size, **columns):
        assert set(size) == {4 if changes else 8}  # a group, or the batch
        return [float(i) for i, _ in enumerate(completion_ids)]

    trainer = make(reward, rollout, **changes)
    trainer.train()
    assert threads == {"rollouts"}
    assert all(before == after for before, after in updates)
    staleness = [r["sampling/staleness"] for r in trainer.state.log_history if "loss" in r]
    assert staleness == [0, 1, 1, 1, 1, 1]
    assert rollouts_end()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rollout_versions": [[0, 7]] * 8}, "versions' from 0 to 0, the optimizer .* got 7"),
        ({"logprobs": None}, "rollout_func: expected 'logprobs' with generation_batches_ahead"),
    ],
)
def test_answers_of_a_function_are_checked(make, wrong, message):
    def rollout(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        return {"prompt_ids": ids, "completion_ids": ids, "logprobs": [[-1.0] * 2] * 8} | wrong

    trainer = make(lambda completion_ids, **_: [0.0] * len(completion_ids), rollout)
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_function_may_hold_a_lock_while_it_generates(make):
    """An evaluation waits for what was begun, which needs the lock, too."""
    lock, threads = threading.Lock(), []

    def rollout(prompts, trainer):
        threads.append(threading.current_thread().name)
        end = time.monotonic() + 0.5
        while len(threads) == 2 and not lock.locked() and time.monotonic() < end:
            time.sleep(0.01)  # the second batch leaves the lock to an evaluation
        ids = [[5, 6]] * len(prompts)
        assert lock.acquire(timeout=5)
        try:
            completions = trainer.rollouts.generate(ids)
        finally:
            lock.release()
        return answer_of(ids, completions)

    trainer = make(
        lambda completion_ids, **_: [0.0] * len(completion_ids), rollout, max_steps=2,
        eval_strategy="steps", eval_steps=1, eval_dataset=Dataset.from_list(ROWS[:2]),
    )  # fmt: skip
    trainer.rollouts.engine._script = lambda text: "ok"
    trainer.train()
    assert "MainThread" in threads and "rollouts" in threads


def test_a_function_generates_nothing_after_its_run(make):
    """It may go on after the run has ended by an error, and other weights may have come."""
    run_ended, calls, errors = threading.Event(), [], []

    def rollout(prompts, trainer):
        ids = [[5, 6]] * len(prompts)
        calls.append(len(ids))
        if len(calls) == 2:  # ahead, while the first batch is scored
            assert run_ended.wait(20)
        try:
            completions = trainer.rollouts.generate(ids)
        except RuntimeError as error:
            errors.append(str(error))
            raise
        return answer_of(ids, completions)

    def reward(**columns):
        while len(calls) < 2:
            time.sleep(0.01)
        raise ValueError("no reward")

    trainer = make(reward, rollout)
    trainer.rollouts.engine._script = lambda text: "ok"
    with pytest.raises(Exception, match="no reward"):
        trainer.train()
    run_ended.set()
    assert rollouts_end()
    assert errors == ["rollouts.generate: the run has ended"]


@pytest.mark.parametrize("ahead", [0, 1])
def test_tools_of_an_environment_that_are_too_slow_twice(make, ahead):
    class Slow(Counter):
        def rest(self) -> None:
            """Rest."""
            time.sleep(0.2)

    trainer = make(
        None, environment_factory=Slow, generation_batches_ahead=ahead, max_steps=1,
        tool_timeout=0.01,
    )  # fmt: skip
    trainer.rollouts.engine._script = lambda text: "ok" if results(text) else 2 * call("rest")
    trainer.train()
    [row] = [row for row in trainer.state.log_history if "loss" in row]
    assert row["tools/call_frequency"] == 2 and row["tools/failure_frequency"] == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [("tools", RuntimeError), *product(["environment", "function"], [RuntimeError, SystemExit])],
)
def test_errors_are_raised_where_completions_are_needed(make, kind, error):
    class Broken(Counter):
        def reset(self, **row):
            raise error("no world")

    def broken(prompts, trainer):
        raise error("no world")

    changes = {"environment_factory": Broken} if kind == "environment" else {}
    if kind == "tools":
        changes = {"tools": [Counter().add]}
    trainer = make(
        lambda prompts, **_: [0.0] * len(prompts), broken if kind == "function" else None, **changes
    )
    if kind == "tools":

        async def fails(prompt_ids, sampling):
            raise RuntimeError("no world")

        trainer.rollouts.engine.complete_one = fails
    with pytest.raises(RuntimeError, match="no world"):
        trainer.train()
    assert rollouts_end()


@pytest.mark.parametrize("changes", IN_FLIGHT)
def test_environments_of_a_resumed_run_begin_again(make, changes, tmp_path):
    """No prompt is lost: what had begun is not in the checkpoint, and is sampled again."""
    runs = []

    def reward(environments, prompts, **columns):
        runs[-1] += [prompt[-1]["content"] for prompt in prompts[::4]]
        return [float(environment.value) for environment in environments]

    settings = {"output_dir": str(tmp_path / "out"), "save_strategy": "steps", "save_steps": 2}
    settings |= {"environment_factory": Counter, "generation_batches_ahead": 2, "max_steps": 4}
    settings |= changes
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        runs.append([])
        make([reward], **settings).train(resume_from_checkpoint=resume)
    assert len(runs[0]) == 8 and runs[1] == runs[0][4:]
