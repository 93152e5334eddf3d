"""generation_batches_ahead: by which weights, in which order, and what becomes of errors."""

from __future__ import annotations

import copy
import threading
import time

import pytest
from transformers import Qwen3ForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support.trainer import BackgroundEngine
from tests.support.vllm_stub import StubServer, choices

COMPLETE = "/v1/completions"
STALENESS = "sampling/staleness"
DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture
def make(make_trainer, policy):
    def run(engine=None, reward=digits_reversal_reward, **changes) -> GRPOTrainer:
        settings = {"generation_batches_ahead": 1, "report_to": "none", "max_steps": 4}
        settings |= {"rollout_engine": engine} | changes
        return make_trainer(reward, copy.deepcopy(policy), **settings)

    return run


@pytest.fixture
def engine(policy, tokenizer) -> BackgroundEngine:
    return BackgroundEngine(tokenizer, Qwen3ForCausalLM(policy.config).eval())


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "rollouts"]


def of_steps(trainer: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if "loss" in row]


def test_one_generation_batch_old(make, engine):
    prompts = []

    def reward(**columns):
        prompts.extend(set(columns["prompts"]))
        return digits_reversal_reward(**columns)

    trainer = make(engine, reward)
    trainer.train()
    assert len(prompts) == len(set(prompts)) == 4  # every prompt has its turn
    assert of_steps(trainer, STALENESS) == [0, 1, 1, 1]
    # weights go out when a generation has ended, before the next one; none is begun for nothing
    one = ["update", "start", "end"]
    assert engine.calls == ["update", "start", "end", "start", "end", *one, *one]
    fresh, *old = of_steps(trainer, DIFFERENCE)
    assert fresh < 1e-4 and min(old) > 1e-4
    weights = of_steps(trainer, "sampling/importance_sampling_ratio/mean")
    assert weights[0] == pytest.approx(1, abs=1e-4)


def test_evaluation_is_by_the_weights_as_they_are(make, engine):
    trainer = make(engine, eval_strategy="steps", eval_steps=1)
    trainer.train()
    name = f"eval_{DIFFERENCE}"
    evaluated = [row[name] for row in trainer.state.log_history if name in row]
    assert len(evaluated) == 4 and max(evaluated) < 1e-4
    assert min(of_steps(trainer, DIFFERENCE)[1:]) > 1e-4


def test_several_steps_of_a_batch(make, engine):
    """Its age is in optimizer steps; ratios are those to the policy where training on it begins."""
    trainer = make(engine, steps_per_generation=2, num_generations=2)
    trainer.train()
    assert [row[STALENESS] for row in trainer.state.log_history if STALENESS in row] == [0, 2]
    ratios = of_steps(trainer, "ratio/max")
    for first in ratios[0], ratios[2]:
        assert first == pytest.approx(1, abs=1e-5)
    assert ratios[1] != pytest.approx(1, abs=1e-5)


def test_it_generates_while_the_policy_trains(make, engine):
    seen = []
    trainer = make(engine)
    loss = trainer.compute_loss

    def compute_loss(*args, **kwargs):
        last = trainer.state.global_step == 3
        while not last and engine.may_end.is_set():
            time.sleep(0.01)  # until it is begun
        found = loss(*args, **kwargs)
        seen.append(engine.calls[-1])
        engine.may_end.set()  # not before the loss is there
        return found

    def work(prompt_ids):
        if engine.calls.count("start") > 1:
            engine.may_end.clear()

    trainer.compute_loss, engine.work = compute_loss, work
    trainer.train()
    assert seen == ["start", "start", "start", "end"]


@pytest.mark.parametrize(
    "error, said", [(KeyboardInterrupt, "stopped after step 0"), (RuntimeError, "enough")]
)
def test_an_interrupted_run_ends_the_generation(make, engine, error, said):
    def reward(**columns):
        if engine.calls.count("start") == 2:
            raise error("enough")
        return digits_reversal_reward(**columns)

    def never(prompt_ids):
        if engine.calls.count("start") == 2:
            engine.may_end.clear()

    engine.work = never
    trainer = make(engine, reward)
    with pytest.raises(error, match=said):
        trainer.train()
    assert engine.calls[-1] == "cancel"
    trainer.train()  # starts again
    assert trainer.state.global_step == 4


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = StubServer()
    yield server
    server.close()


def on_a_server(stub: StubServer, **changes) -> dict:
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": stub.port}
    return settings | {"vllm_server_timeout": 5.0} | changes


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_that_is_silent_is_not_waited_for(make, stub, busy):
    """Nor is one that is tried again and again."""
    silent = threading.Event()

    def answer():
        if len(asked()) == 3 and not busy:
            silent.wait(60)
        return 200, {"choices": choices(stub.asked[-1][1]["prompt"], 4)}

    def asked():
        return [path for path in stub.paths() if path == COMPLETE]

    stub.script[COMPLETE] = [answer, answer, *[(503, b"") if busy else answer] * 99]
    steps = []

    def reward(**columns):
        steps.append(len(asked()))
        while len(steps) == 2 and len(asked()) < 3:
            time.sleep(0.01)
        if len(steps) == 2:
            raise KeyboardInterrupt
        return digits_reversal_reward(**columns)

    trainer = make(reward=reward, **on_a_server(stub, vllm_server_timeout=60.0))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert time.monotonic() - start < 30
    silent.set()
    stub.script[COMPLETE] = [answer] * 99
    trainer.train()  # the connection is not spoiled
    assert of_steps(trainer, STALENESS)[1:] == [1, 1, 1]
    trainer.rollouts.close()
