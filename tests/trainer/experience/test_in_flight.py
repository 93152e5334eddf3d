"""max_staleness: groups go on while newer weights reach the engine."""

from __future__ import annotations

import asyncio
import copy
import threading

import pytest
import torch
from transformers import Qwen3ForCausalLM

from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import Completion, RolloutEngine
from grpo_trainer.vllm import ServerError
from tests.support.threads import rollouts_end
from tests.support.trainer import CannedEngine, of_steps

GENERATE = "/inference/v1/generate"
SIZE = 4  # completions of a group


class PacedEngine(RolloutEngine):
    """A server with room for every request, which draws one token after the other, each by the
    weights of that moment.

    Args:
        tokenizer, model: as in BackgroundEngine.
        waits: by the number of a group, how many updates have to come before its second token.
    """

    updates_in_flight = True

    def __init__(self, tokenizer, model, waits=()) -> None:
        self._canned = CannedEngine(tokenizer, 0)
        self._eos = tokenizer.eos_token_id
        self._model = model
        self._waits = dict(waits)
        self._lock = threading.Lock()  # of the weights
        self.asked = 0
        self.updates = 0

    async def complete_one(self, prompt_ids, sampling) -> Completion:
        group, row = divmod(self.asked, SIZE)
        self.asked += 1
        ids = [3 + row, *self._canned._complete(prompt_ids, row, self._eos)][: sampling.max_tokens]
        logprobs, versions = [], []
        for place, token in enumerate(ids):
            while place and self.updates < self._waits.get(group, 0):
                await asyncio.sleep(0.01)
            with self._lock, torch.no_grad():
                logits = self._model(input_ids=torch.tensor([prompt_ids + ids[:place]])).logits
                versions.append(self.updates)
            logprobs.append(logits[0, -1].double().log_softmax(-1)[token].item())
        return Completion(ids, logprobs, versions=versions)

    def generate(self, prompt_ids, sampling):
        return self._canned.generate(prompt_ids, sampling)

    def update_weights(self, weights, adapter=False) -> None:
        sent = {name: value.clone() for name, value in weights()}
        with self._lock:
            self._model.load_state_dict(sent)
            self.updates += 1


class Seen:
    """A column that notes what each step trains on."""

    def __init__(self) -> None:
        self.steps: list[list[dict]] = []
        self.trainer = None

    def __call__(self, batch, policy) -> None:
        self.steps.append(
            [
                {
                    "prompt": sample.prompt,
                    "ids": sample.completion_ids,
                    "logprobs": sample.logprobs,
                    "ages": [self.trainer.state.global_step - v for v in sample.rollout_versions],
                    "in_loss": sample.in_loss,
                    "trained": (target != -100).sum().item(),
                }
                for sample, target in zip(batch.samples, batch.target, strict=True)
            ]
        )


@pytest.fixture
def make(make_trainer, policy, tokenizer):
    def run(waits=(), **changes):
        seen = Seen()
        engine = PacedEngine(tokenizer, Qwen3ForCausalLM(policy.config).eval(), waits)
        settings = {
            "generation_batches_ahead": 1, "max_staleness": 5, "report_to": "none", "max_steps": 6,
            "per_device_train_batch_size": 2 * SIZE, "num_generations": SIZE, "columns": [seen],
            "rollout_engine": engine, "shuffle_dataset": False,
        }  # fmt: skip
        reward = changes.pop("reward", digits_reversal_reward)
        trainer = make_trainer(reward, copy.deepcopy(policy), **settings | changes)
        seen.trainer = trainer
        return trainer, seen

    return run


def prompts(seen: Seen) -> list[list[str]]:
    return [[one["prompt"] for one in step[::SIZE]] for step in seen.steps]


def test_unfinished_groups_go_on_and_none_is_lost(make):
    """Group 1 of the first batch waits for the fourth update; the others take its place."""
    trainer, seen = make(waits={1: 4})
    trainer.train()
    straight = make(generation_batches_ahead=0, max_staleness=None, rollout_engine=None)[0]
    rows = [row["prompt"] for row in straight.train_dataset.select(range(12))]
    order = [0, 2, 3, 4, 5, 6]
    trained = [prompt for step in prompts(seen) for prompt in step]
    assert trained[:6] == [rows[group] for group in order]
    assert sorted(trained) == sorted(rows)  # each prompt once
    [late] = [i for i, step in enumerate(prompts(seen)) if rows[1] in step]
    assert late >= 3
    for one in seen.steps[late]:
        if one["prompt"] == rows[1]:
            # its first token by the first weights, the others by the fourth or a later update
            assert one["ages"][0] == late and max(one["ages"][1:]) <= late - 3
    staleness = of_steps(trainer, "sampling/staleness/max")
    assert staleness[0] == 0 and staleness[late] == late and max(staleness) <= 5
    ages = [age for one in seen.steps[late] for age in one["ages"]]
    mean = of_steps(trainer, "sampling/staleness")[late]
    assert mean == pytest.approx(sum(ages) / len(ages))
    assert trainer.rollouts.engine.asked == 12 * SIZE  # nothing is begun that is not trained on
    assert rollouts_end()


def test_tokens_that_are_too_old_are_left_out(make):
    trainer, seen = make(waits={1: 4}, max_staleness=2)
    trainer.train()
    masked = 0
    for step in seen.steps:
        for one in step:
            assert one["in_loss"] == [int(age <= 2) for age in one["ages"]]
            assert one["trained"] == sum(one["in_loss"])
            masked += one["in_loss"].count(0)
    assert masked >= SIZE
    shares = of_steps(trainer, "sampling/too_old")
    tokens = [sum(len(one["ids"]) for one in step) for step in seen.steps]
    counted = sum(share * count for share, count in zip(shares, tokens, strict=True))
    assert counted == pytest.approx(masked)


def test_the_correction_is_by_the_weights_of_each_token(make):
    """Log-probabilities are those of the version that drew a token: the loss's ratio knows it."""
    trainer, _ = make(waits={1: 3})
    trainer.train()
    apart = of_steps(trainer, "sampling/sampling_logp_difference/max")
    assert apart[0] < 1e-4 and min(apart[1:]) > 1e-4  # the first batch is the policy's own


@pytest.mark.parametrize("ahead", [1, 2])
def test_further_groups_of_dynamic_sampling(make, ahead):
    calls = []

    def reward(prompts, **columns):
        calls.append(len(prompts))
        return [1.0] * len(prompts) if len(calls) == 2 else [float(i) for i in range(len(prompts))]

    trainer, seen = make(reward=reward, dynamic_sampling=True, generation_batches_ahead=ahead)
    trainer.train()
    assert calls == [8] * 7 and len(seen.steps) == 6  # the second batch is replaced


def test_a_resumed_run_trains_on_what_had_begun(make, tmp_path):
    folder = str(tmp_path / "out")
    settings = {"output_dir": folder, "save_strategy": "steps", "save_steps": 3}
    trainer, seen = make(**settings, generation_batches_ahead=2)
    trainer.train()
    again, resumed = make(**settings, generation_batches_ahead=2)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    # what had begun: two batches that were sampled ahead
    assert resumed.steps[:2] == seen.steps[3:5]
    assert prompts(resumed) == prompts(seen)[3:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_batches_ahead": 0}, "max_staleness: expected None without generation_batc"),
        ({"max_staleness": 0}, "max_staleness: expected at least 1, .* got 0"),
        ({"generation_batches_ahead": 3, "max_staleness": 2}, "expected at least 3, .* got 2"),
        ({"num_iterations": 2, "max_staleness": 1}, "expected at least 2, .* got 1"),
        ({"max_staleness": -1}, "max_staleness: expected an integer >= 0, got -1"),
        (
            {"generation_kwargs": {"seed": 1}, "use_vllm": True, "vllm_mode": "server"},
            r"generation_kwargs\['seed'\]: expected none with generation_batches_ahead",
        ),
    ],
)
def test_settings_that_do_not_fit(make, changes, message):
    with pytest.raises(ValueError, match=message):
        make(**{"rollout_engine": None} | changes if "use_vllm" in changes else changes)


def test_an_engine_that_takes_no_weights_in_flight(make, monkeypatch):
    monkeypatch.setattr(PacedEngine, "updates_in_flight", False)
    with pytest.raises(ValueError, match="max_staleness: .*accepts weights while it generates"):
        make()


def test_an_engine_that_does_not_say_which_weights_drew_a_token(make, monkeypatch):
    complete_one = PacedEngine.complete_one

    async def without_versions(*arguments):
        return (await complete_one(*arguments))._replace(versions=None)

    monkeypatch.setattr(PacedEngine, "complete_one", without_versions)
    with pytest.raises(ValueError, match="PacedEngine: expected versions of its tokens .* None"):
        make()[0].train()


def test_a_server_says_which_weights_drew_a_token(make, stub):
    served = {
        "use_vllm": True, "vllm_mode": "server", "vllm_server_port": stub.port,
        "rollout_engine": None, "max_steps": 3,
    }  # fmt: skip
    trainer, seen = make(**served)
    trainer.train()
    asked = [path for path in stub.paths() if path in (GENERATE, "/resume")]
    assert asked.count(GENERATE) == 6 * SIZE and asked.count("/resume") == 3
    assert all(one["ages"] == [age, age] for age, one in [(0, seen.steps[0][0])])
    stub.script["/pause?mode=keep"] = [(200, {}), (400, {})]
    with pytest.raises(ServerError, match="/pause"):
        trainer.train()
    trainer.train()  # an update that failed has a number, too
    first, *others = of_steps(trainer, "sampling/staleness")
    assert first == 0 and min(others) >= 0
    trainer.rollouts.close()
    trainer, _ = make(**served)
    stub.script["/update_weight_version"] = [(200, {})]  # the server keeps another name for them
    with pytest.raises(Exception, match="weights that this run did not send, version"):
        trainer.train()
    trainer.rollouts.close()
