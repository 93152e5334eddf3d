"""overlap_generation: by which weights, in which order, and what becomes of errors."""

from __future__ import annotations

import copy
import threading
import time
import traceback

import pytest
from transformers import Qwen3ForCausalLM, TrainerCallback

from grpo_trainer import GRPOTrainer
from grpo_trainer.common import in_thread
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.rollout import ServerError, WeightsLostError
from grpo_trainer.rollout.http import JsonServer
from tests.support.trainer import BackgroundEngine
from tests.support.vllm_stub import StubServer, choices

STALENESS = "sampling/staleness"
DIFFERENCE = "sampling/sampling_logp_difference/max"


@pytest.fixture
def make(make_trainer, policy):
    def run(engine=None, reward=digits_reversal_reward, **changes) -> GRPOTrainer:
        settings = {"overlap_generation": True, "report_to": "none", "max_steps": 4}
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


@pytest.mark.parametrize(
    "changes, staleness",
    [
        ({"num_iterations": 2}, [0, 2]),
        ({"steps_per_generation": 2, "per_device_train_batch_size": 2}, [0, 2]),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 1}, [0, 0.5, 0.5, 0.5]),
    ],
)
def test_it_is_counted_in_optimizer_steps(make, engine, changes, staleness):
    trainer = make(engine, **({"num_generations": 2} | changes))
    trainer.train()
    rows = trainer.state.log_history
    assert [row[STALENESS] for row in rows if STALENESS in row] == staleness


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


def test_old_logprobs_are_of_the_policy_at_the_start_of_training(make, engine):
    trainer = make(engine, steps_per_generation=2, num_generations=2, logging_steps=1)
    trainer.train()
    ratios = of_steps(trainer, "ratio/max")
    for first in ratios[0], ratios[2]:  # steps of a batch
        assert first == pytest.approx(1, abs=1e-5)
    assert ratios[1] != pytest.approx(1, abs=1e-5)


def test_evaluation_is_by_the_weights_as_they_are(make, engine):
    trainer = make(engine, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluated = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert len(evaluated) == 4
    assert max(row[f"eval_{DIFFERENCE}"] for row in evaluated) < 1e-4
    assert of_steps(trainer, STALENESS) == [0, 1, 1, 1]
    assert max(of_steps(trainer, DIFFERENCE)[1:]) > 1e-4


def test_errors_come_with_their_traceback(make, engine):
    def out_of_luck(prompt_ids):
        raise RuntimeError("the server is out of luck")

    engine.work = out_of_luck
    with pytest.raises(RuntimeError, match="out of luck") as caught:
        make(engine).train()
    assert "out_of_luck" in "".join(traceback.format_tb(caught.value.__traceback__))


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


def test_an_early_stop_ends_the_generation(make, engine):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = make(engine, callbacks=[Stop()])
    trainer.train()
    assert trainer.state.global_step == 1
    trainer.evaluate()
    after = engine.calls.index("cancel") + 1
    assert engine.calls[after : after + 2] == ["update", "generate"]


def test_lost_weights(make, engine):
    """They cannot be had again: the policy is asked as it is by then."""
    fails = iter([False, True])

    def lost(prompt_ids):
        if next(fails, False):
            raise WeightsLostError("restarted")

    engine.work = lost
    trainer = make(engine)
    trainer.train()
    assert of_steps(trainer, STALENESS) == [0, 0, 1, 1]
    assert of_steps(trainer, DIFFERENCE)[1] < 1e-4
    assert engine.calls[4:7] == ["end", "update", "generate"]


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    server = StubServer()
    yield server
    server.close()


def on_a_server(stub: StubServer, **changes) -> dict:
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": stub.port}
    return settings | {"vllm_server_timeout": 5.0} | changes


def test_a_server_that_is_silent_is_not_waited_for(make, stub):
    silent = threading.Event()
    asked = 0

    def answer():
        nonlocal asked
        asked += 1
        if asked == 3:
            silent.wait(60)
        return 200, {"choices": choices(stub.asked[-1][1]["prompt"], 4)}

    stub.script["/v1/completions"] = [answer] * 3
    steps = 0

    def reward(**columns):
        nonlocal steps
        steps += 1
        while asked < 3 and steps == 2:
            time.sleep(0.01)
        if steps == 2:
            raise KeyboardInterrupt
        return digits_reversal_reward(**columns)

    trainer = make(reward=reward, **on_a_server(stub))
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert time.monotonic() - start < 30
    silent.set()
    trainer.train()  # the connection is not spoiled
    assert of_steps(trainer, STALENESS)[1:] == [1, 1, 1]
    trainer.rollouts.close()


def test_a_server_that_restarts_meanwhile_gets_the_weights_it_had(make, stub):
    def die():
        stub.version = "default"
        return 500, {"error": "EngineCore encountered an issue"}

    usual = [lambda: (200, {"choices": choices(stub.asked[-1][1]["prompt"], 4)})] * 2
    stub.script["/v1/completions"] = [*usual, die]
    trainer = make(**on_a_server(stub))
    trainer.train()
    assert of_steps(trainer, STALENESS) == [0, 1, 1, 1]
    folders = [folder.rpartition("-")[2] for folder in stub.loaded]
    assert folders == ["1", "2", "2", "3"]
    trainer.rollouts.close()


def test_interrupted_requests(stub):
    server = JsonServer(stub.url, patience=60.0)
    stub.script["/health"] = [(503, b"")] * 99
    errors = []

    def ask():
        try:
            server.retrying(lambda: server.get("/health"))
        except ServerError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    while not stub.asked:
        time.sleep(0.01)
    with server.interrupted():
        thread.join(10)
    assert errors == [f"GET {stub.url}/health: interrupted"]
    stub.script.clear()
    assert server.get("/health") == {}
    server.close()


def test_interrupted_while_the_server_is_silent(stub):
    server = JsonServer(stub.url, patience=60.0)
    over = threading.Event()
    stub.script["/health"] = [lambda: (over.wait(60) and 200, {})] * 8

    def ask() -> str:
        with pytest.raises(ServerError) as error:
            server.get("/health")
        return str(error.value)

    waiting = [in_thread(ask, "a test") for _ in range(8)]
    while len(stub.asked) < 8:
        time.sleep(0.01)
    with server.interrupted():
        errors = {request.result(10) for request in waiting}
    over.set()
    assert errors == {f"GET {stub.url}/health: interrupted"}
    server.close()
