"""generation_batches_ahead: by which weights, in which order, and what becomes of errors."""

from __future__ import annotations

import copy
import itertools
import threading
import time

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM

from grpo_trainer import GRPOTrainer
from grpo_trainer.checkpoint.files import write_manifest
from grpo_trainer.demo.task import digits_reversal_reward
from tests.support.threads import rollouts_end
from tests.support.trainer import BackgroundEngine, logged, of_steps
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
    assert rollouts_end()


def until(condition) -> None:
    """Wait until something in the background has happened."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def by_update(engine: BackgroundEngine) -> list[tuple[int, int]]:
    """Return how many batches of four began and ended by the weights of each update."""
    assert engine.calls[0] == "update"
    parts = " ".join(engine.calls).split("update")[1:]
    return [(part.count("start") // 4, part.count("end") // 4) for part in parts]


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_completions_are_at_most_as_many_batches_old(make, engine, policy, ahead):
    """The engine's weights are the policy's from before as many steps as the log says."""
    trained, sampled, prompts = [], [], []

    def first_weights(model) -> list[float]:
        return model.lm_head.weight[0].tolist()

    def reward(**columns):
        trained.append(first_weights(trainer.model))
        prompts.append(columns["prompts"][0])
        return digits_reversal_reward(**columns)

    engine.work = lambda prompt_ids: sampled.append(first_weights(engine._model))
    trainer = make(engine, reward, generation_batches_ahead=ahead, max_steps=8)
    trainer.train()
    ages = of_steps(trainer, STALENESS)
    assert ages == [0, *(1 + batch % ahead for batch in range(7))]
    assert of_steps(trainer, "sampling/staleness/max") == ages
    weights = sorted(trained[step - int(age)] for step, age in enumerate(ages) for _ in range(4))
    assert sorted(sampled) == weights
    assert all(a != b for a, b in itertools.pairwise(trained))
    # a round is begun when the one before has ended; the last has what training takes
    rounds = [ahead] * (7 // ahead) + [7 % ahead] * (7 % ahead > 0)
    rounds[0] += 1  # the first batch is by the same weights
    assert by_update(engine) == [(size, size) for size in rounds]
    assert prompts == in_order(make)  # every prompt has its turn
    fresh, *old = of_steps(trainer, DIFFERENCE)
    assert fresh < 1e-4 and min(old) > 1e-4
    ratios = of_steps(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios[0] == pytest.approx(1, abs=1e-4)


def in_order(make) -> list[str]:
    """Return the prompts of eight batches of a run that generates nothing ahead."""
    prompts = []

    def reward(**columns):
        prompts.append(columns["prompts"][0])
        return digits_reversal_reward(**columns)

    make(reward=reward, generation_batches_ahead=0, max_steps=8).train()
    return prompts


@pytest.mark.parametrize("ahead", [2, 5])
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "max_steps": 6},
        {"gradient_accumulation_steps": 4, "steps_per_generation": 1, "max_steps": 3},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 2, "num_iterations": 2},
        # an epoch of three batches, whose second step has one micro-batch
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "num_train_epochs": 2},
        {"dynamic_sampling": True, "max_steps": 5},
    ],
)
def test_none_is_begun_that_is_not_trained_on(make, engine, ahead, changes):
    scored = []

    def reward(prompts, **columns):
        scored.append(prompts)
        return [float(row) for row, _ in enumerate(prompts)]

    if "num_train_epochs" in changes:
        rows = [{"prompt": f"{i}=", "answer": str(i)} for i in range(3)]
        changes = {"max_steps": -1, "train_dataset": Dataset.from_list(rows)} | changes
    trainer = make(engine, reward, generation_batches_ahead=ahead, **changes)
    trainer.train()
    batches = trainer._generation_batches()
    assert trainer.state.global_step == trainer.state.max_steps
    assert engine.calls.count("start") == engine.calls.count("end") == sum(map(len, scored))
    assert len(scored) == batches
    assert "cancel" not in engine.calls


def test_further_rounds_wait_for_what_was_begun(make, engine):
    """Those of dynamic sampling are by the weights as they are, the batches begun by theirs."""
    asked = []

    def reward(prompts, **columns):
        asked.append(engine.calls[-1])
        return [1.0] * 4 if len(asked) == 3 else [1.0, 2.0, 3.0, 4.0]

    changes = {"dynamic_sampling": True, "generation_batches_ahead": 3, "max_steps": 4}
    trainer = make(engine, reward, **changes)
    trainer.train()
    # the third batch has nothing to learn from, while the fourth may still be running
    assert by_update(engine) == [(4, 4), (0, 0)]
    assert engine.calls[-2:] == ["update", "generate"]
    assert asked[3] == "generate" and len(asked) == 5
    assert of_steps(trainer, STALENESS) == [0, 1, 2, 3]


def test_evaluation_is_by_the_weights_as_they_are(make, engine):
    trainer = make(engine, eval_strategy="steps", eval_steps=1, generation_batches_ahead=2)
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
    seen, begun, one_by_one = [], itertools.count(), threading.Lock()
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
        with one_by_one:
            if next(begun) in (4, 8, 12):  # the first of a batch; a late one would stop it again
                engine.may_end.clear()

    trainer.compute_loss, engine.work = compute_loss, work
    trainer.train()
    assert seen == ["start", "start", "start", "end"]


@pytest.mark.parametrize(
    ("error", "said", "ahead"),
    [(KeyboardInterrupt, "stopped after step 0", 1), (RuntimeError, "enough", 2)],
)
def test_an_interrupted_run_ends_the_generation(make, engine, error, said, ahead):
    def reward(**columns):
        if interrupted:
            return digits_reversal_reward(**columns)
        until(lambda: engine.calls.count("start") == 4 + 4 * ahead)
        interrupted.append(error)
        raise error("enough")

    def work(prompt_ids):
        if engine.calls.count("end") >= 4:  # those of the first batch
            gate.wait(30)

    interrupted, gate, engine.work = [], threading.Event(), work
    trainer = make(engine, reward, generation_batches_ahead=ahead)
    with pytest.raises(error, match=said):
        trainer.train()
    until(lambda: engine.calls.count("cancel") == 4 * ahead)
    gate.set()
    trainer.train()  # starts again
    assert trainer.state.global_step == 4


def test_a_checkpoint_of_1_0_0_goes_on(make, engine, policy, tokenizer, tmp_path):
    """It has the completions of each generation batch that had begun, as the engine gave them."""
    settings = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1}
    settings |= {"generation_batches_ahead": 2}
    straight = make(engine, **settings)
    straight.train()
    folder = tmp_path / "checkpoint-1"
    states = torch.load(folder / "process_state_0.pt")
    prompts = states["prompts"]
    assert len(prompts["draws"]) == 2
    states["prompts"], states["ahead"] = prompts["prompts"], []
    for draw in prompts["draws"]:
        [part] = draw["parts"]
        columns = {name: [one[name] for one in part["completed"]] for name in part["completed"][0]}
        completions = {"token_ids": columns["completion_ids"], "logprobs": columns["logprobs"]}
        step = columns["rollout_versions"][0][0]
        begun = {"before": draw["before"], "step": step, "completions": completions}
        states["ahead"].append(begun)
    torch.save(states, folder / "process_state_0.pt")
    write_manifest(folder)
    again = make(BackgroundEngine(tokenizer, Qwen3ForCausalLM(policy.config).eval()), **settings)
    again.train(resume_from_checkpoint=str(folder))
    assert logged(again) == logged(straight)


def test_a_server_is_asked_for_all_batches_of_a_round_at_once(make, stub):
    together = threading.Barrier(8)

    def meet() -> None:
        together.wait(30)

    stub.script[COMPLETE] = [lambda: None] * 4 + [meet] * 8
    trainer = make(generation_batches_ahead=2, max_steps=3, **on_a_server(stub))
    trainer.train()
    assert stub.paths().count(COMPLETE) == 12  # no request was repeated
    assert of_steps(trainer, STALENESS) == [0, 1, 2]
    trainer.rollouts.close()


def on_a_server(stub: StubServer, **changes) -> dict:
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": stub.port}
    return settings | {"vllm_server_timeout": 5.0} | changes


@pytest.mark.parametrize("busy", [False, True])
def test_a_server_that_is_silent_is_not_waited_for(make, stub, busy):
    """Nor is one that is tried again and again."""
    silent = threading.Event()

    def answer():
        if len(asked()) > 8 and not busy:
            silent.wait(60)
        [choice] = choices([[0]], 1)
        return 200, {"choices": [choice | {"prompt_token_ids": None}]}

    def asked():
        return [path for path in stub.paths() if path == COMPLETE]

    stub.script[COMPLETE] = [answer] * 8 + [(503, b"") if busy else answer] * 99
    steps = []

    def reward(**columns):
        steps.append(len(asked()))
        while len(steps) == 2 and len(asked()) < 9:
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
