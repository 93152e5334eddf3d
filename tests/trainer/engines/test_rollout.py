"""Rollout engines: what they are asked, when they get weights, what becomes of their answers."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import GenerationConfig

from grpo_trainer import GRPOTrainer
from grpo_trainer.engines import (
    Completion,
    Completions,
    EngineContext,
    RolloutEngine,
    Sampler,
    Sampling,
    register_rollout_engine,
)
from grpo_trainer.engines.base import vllm_params
from grpo_trainer.engines.sampler import ENGINES
from tests.support.batches import BatchTrainer
from tests.support.trainer import BackgroundEngine, adapted, generating


@pytest.fixture
def train(make_trainer):
    def run(engine, **changes) -> GRPOTrainer:
        trainer = make_trainer(engine=engine, **changes)
        trainer.train()
        return trainer

    return run


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if "reward" in row]


@pytest.mark.parametrize(
    ("generation", "config", "kwargs", "ends"),
    [
        ([4, 5], 1, {}, {1, 4, 5}),
        (4, 1, {}, {1, 4}),
        (None, [6, 7], {}, {1, 6, 7}),
        ([4], 6, {}, {1, 4}),  # the generation config speaks first
        (None, None, {}, {1}),
        ([-1, 4, 99], 1, {}, {1, 4}),  # such ids are never drawn
        ([4, 5], 1, {"stop_token_ids": [7]}, {1, 4, 5, 7}),
        ([4, 5], 1, {"eos_token_id": 6}, {6}),
        ([4, 5], 1, {"eos_token_id": [6], "stop_token_ids": [7]}, {6, 7}),
    ],
)
def test_ends_of_a_completion(
    make_args, policy, tokenizer, caplog, generation, config, kwargs, ends
):
    policy.generation_config.eos_token_id, policy.config.eos_token_id = generation, config
    args = make_args(generation_kwargs=kwargs)  # which transformers' engines take
    sampling = Sampling.from_config(args, tokenizer, policy)
    assert sampling.eos_token_ids == ends and not sampling.engine_options
    assert vllm_params(sampling)["stop_token_ids"] == sorted(ends)
    strange = generation == [-1, 4, 99]
    assert (
        "eos_token_id -1, 99 ignored: the model's token ids are 0 to 13" in caplog.text
    ) == strange


@pytest.mark.parametrize("name", ["eos_token_id", "stop_token_ids"])
def test_ends_that_are_no_tokens(make_args, policy, tokenizer, name):
    for ids in (-1, [14], "1", [True], [[1]]):
        args = make_args(generation_kwargs={name: ids})
        with pytest.raises(ValueError, match=rf"_kwargs\['{name}'\]: expected token ids"):
            Sampling.from_config(args, tokenizer, policy)


@pytest.mark.parametrize("adapter", [False, True])
def test_the_model_says_nothing_of_sampling(policy, tokenizer, monkeypatch, adapter):
    """Whatever its generation_config sets, known to this version of transformers or not."""
    used, made = [], policy._get_logits_processor

    def seen(generation_config, *args, **more):
        used.append(generation_config.to_dict())
        return made(generation_config, *args, **more)

    monkeypatch.setattr(policy, "_get_logits_processor", seen)
    model = adapted(policy, r=2) if adapter else policy
    engine = generating(model, tokenizer)
    for value in (None, 7):
        policy.generation_config = config = GenerationConfig()
        names = [name for name in vars(config) if not name.startswith("_")]
        for name in (*names, "of_a_later_version"):
            setattr(config, name, value)
        engine.generate([[3]], Sampling(eos_token_ids=frozenset([1]), max_tokens=2))
        assert policy.generation_config is config and config.num_beams == value
    assert used[0] == used[1] and len(used[0]) > 50


@pytest.mark.slow
def test_completions_end_with_whatever_the_model_names(make_trainer, policy, tokenizer):
    other = tokenizer.convert_tokens_to_ids("7")
    ends = {tokenizer.eos_token_id, other}  # the first also fills up
    policy.generation_config.eos_token_id = [other]
    seen = []

    def reward(completion_ids, completions, **kwargs):
        seen.extend(zip(completion_ids, completions, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(
        reward, kind=BatchTrainer, per_device_train_batch_size=64, max_completion_length=6,
        temperature=0.7, mask_truncated_completions=True,
    )  # fmt: skip
    trainer.train()
    assert {ids[-1] for ids, _ in seen} > ends  # all ways to end occur, the limit too
    assert not any(ends & set(ids[:-1]) for ids, _ in seen)
    assert all(text == tokenizer.decode(ids).removesuffix("<eos>") for ids, text in seen)
    cut = [ids[-1] not in ends for ids, _ in seen[:64]]
    assert logged(trainer, "completions/clipped_ratio")[0] == pytest.approx(sum(cut) / 64)
    batch = trainer.batches[0]
    assert (batch.target < 0).all(1).tolist() == cut
    assert batch.num_items == sum(len(ids) for ids, _ in seen[:64] if ids[-1] in ends)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "sgd"])
def test_weights_are_sent_when_they_changed(train, tokenizer, optim):
    engine = BackgroundEngine(tokenizer)
    trainer = train(engine, optim=optim, max_steps=2)
    assert engine.calls == ["update", "generate"] * 2
    trainer.evaluate(trainer.train_dataset.select(range(4)))
    assert engine.calls[4] == "update" and "update" not in engine.calls[5:]
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(0.5)  # as loading a checkpoint does
    trainer.evaluate(trainer.train_dataset.select(range(1)))
    assert engine.calls[-2:] == ["update", "generate"]


def test_ratios_against_the_engine_need_no_old_policy(train, tokenizer, policy):
    engine = BackgroundEngine(tokenizer, copy.deepcopy(policy).eval())
    trainer = train(engine, loss_type="cppo", num_iterations=2, steps_per_generation=1)
    assert trainer.state.global_step == 2
    assert [batch.old_logprobs for batch in trainer._buffer.batches] == [None]
    assert logged(trainer, "clip_ratio/region_mean")[0] == 0


class Answers(RolloutEngine):
    """Has the same answer to everything."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def generate(self, prompt_ids, sampling):
        return self.answer

    async def complete_one(self, prompt_ids, sampling):
        return self.answer


@pytest.fixture
def make_rollouts(make_args, policy, tokenizer):
    """Make what samples completions of at most three tokens by an engine with an answer."""
    args = make_args(max_completion_length=3)
    context = EngineContext(
        policy=lambda: policy, processing_class=tokenizer, args=args,
        accelerator=Accelerator(cpu=True), vocab_size=len(tokenizer),
    )  # fmt: skip
    sampling = Sampling.from_config(args, tokenizer, policy)
    return lambda answer: Sampler(Answers(answer), context, sampling, step=lambda: 0, name="")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected Completions, got None"),
        ([[[2]]], "expected token_ids for 2 completions, got 1"),
        ([[[2], []]], "completion 1: expected 1 to 3 tokens, got 0"),
        ([[[2], [2, 3, 4, 5]]], "completion 1: expected 1 to 3 tokens, got 4"),
        ([[[2], [2, 14]]], "completion 1: expected token ids 0 <= id < 14, got 14"),
        ([[[-1], [2]]], "completion 0: expected token ids 0 <= id < 14, got -1"),
        ([[[True], [2]]], "completion 0: expected token ids .*, got True"),
        ([[[2.0], [2]]], "completion 0: expected token ids .*, got 2.0"),
        ([[2, 3]], "completion 0: expected a list of token ids, got 2"),
        ([[[2], [1, 3]]], "no token after the first end-of-sequence token, got 1 as token 1 of 2"),
        ([[[2], [3]], [0.0, 0.0]], "one log-probability per token, got float for 1"),
        ([torch.ones(2, 1)], "expected a list of token_ids, got tensor"),
        ([[[2], [3]], torch.zeros(2, 1)], "expected a list of logprobs, got tensor"),
        ([[[2], [3]], [[0.0]]], "expected logprobs for 2 completions, got 1"),
        ([[[2], [3]], [[0.0], [0.0, 0.0]]], "one log-probability per token, got 2 for 1"),
        ([[[2], [3]], [[0.5], [0.0]]], "log-probabilities of at most 0, got 0.5"),
        ([[[2], [3]], [["a"], [0.0]]], "expected log-probabilities, got 'a'"),
        ([[[2], [3]], None, [[[2]], [[3, 14]]]], "completion 1: expected token ids .*, got 14"),
    ],
)
def test_answers_are_checked(make_rollouts, answer, message):
    rollouts = make_rollouts(answer and Completions(*answer))
    with pytest.raises(ValueError, match=f"rollout engine Answers: .*{message}"):
        rollouts.generate([[1], [2]])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "rollout engine Answers: expected a Completion of `complete_one`, got None"),
        (Completion([2, 3, 4, 5], [0.0] * 4), "Answers: .*expected 1 to 3 tokens, got 4"),
        (Completion([2], [0.5]), "Answers: .*log-probabilities of at most 0, got 0.5"),
        (Completion([2]), "generation_batches_ahead: .*reports log-probabilities, .*got none"),
        (Completion([2], [0.0], versions=[2]), "Answers: expected versions from 1 to 1, .*got 2"),
        (Completion([2], [0.0], versions=[0]), "Answers: expected versions from 1 to 1, .*got 0"),
        (Completion([2], [0.0], versions=[]), "Answers: .*one version per token, got 0 for 1"),
    ],
)
def test_answers_in_the_background_are_checked(make_rollouts, answer, message):
    rollouts = make_rollouts(answer)
    rollouts.send()
    with pytest.raises(ValueError, match=message):
        rollouts.start(rollouts.complete([1])).result()
    rollouts.cancel()


def test_numbers_of_numpy_are_numbers(make_rollouts):
    answer = Completions([[*np.array([2, 1])]], [[*np.float32([-1.0, -np.inf])]])
    completions = make_rollouts(answer).generate([[1]])
    ids, [(known, unknown)] = completions.token_ids, completions.logprobs
    assert ids == [[2, 1]] and type(ids[0][0]) is int
    assert known == -1.0 and unknown != unknown


def test_an_engine_of_another_package(make_trainer, tokenizer, monkeypatch):
    monkeypatch.setattr("grpo_trainer.engines.sampler.ENGINES", dict(ENGINES))
    made = []

    def factory(context):
        made.append(BackgroundEngine(context.tokenizer))
        return made[0]

    with pytest.raises(ValueError, match="rollout_engine: expected one of transformers, .*'mine'"):
        make_trainer(rollout_engine="mine")
    register_rollout_engine("mine", factory)
    with pytest.raises(ValueError, match="'mine', which is registered"):
        register_rollout_engine("mine", factory)
    make_trainer(rollout_engine="mine", generation_kwargs={"own_option": 1}).train()
    assert made[0].calls == ["update", "generate"] * 2
    assert made[0].sampling.engine_options == {"own_option": 1}


# settings with use_vllm -> the message
REFUSED = [
    ({"vllm_weight_transfer": "pickle"}, "vllm_weight_transfer: expected one of auto, file"),
    ({"vllm_mode": "server", "vllm_server_base_url": "10.0.0.1:80"}, "url: expected http://h"),
    ({"vllm_mode": "server", "vllm_enable_sleep_mode": True}, "sleep_mode: .*='colocate'"),
    ({"vllm_server_port": 9000}, "vllm_server_port: expected only with vllm_mode='server'"),
    ({"cache_implementation": "static"}, "cache_implementation: expected None with use_vllm"),
    ({"rollout_engine": "mine"}, "use_vllm: expected False with rollout_engine"),
    ({"loss_type": "vespo"}, "vllm_importance_sampling_mode: expected one of token_truncate"),
    ({"vllm_importance_sampling_clip_min": 4.0}, "sampling_clip_min: expected a number below"),
    ({"generation_kwargs": {"max_tokens": 5}}, "expected the field max_completion_length"),
    ({"generation_kwargs": {"logprobs": 3}}, "generation_kwargs: expected none of logprobs"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_wrong_settings(make_args, tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        vllm_params(Sampling.from_config(make_args(use_vllm=True, **changes), tokenizer))


def test_no_vllm(make_trainer, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="expected one engine, got it and vllm_colocate in args"):
        make_trainer(use_vllm=True, engine=BackgroundEngine(tokenizer))
    with pytest.raises(ValueError, match="use_vllm: expected vllm to be .*; pip install .*vllm"):
        make_trainer(use_vllm=True)
    server = {"vllm_mode": "server", "vllm_server_port": 1, "vllm_server_timeout": 0.1}
    with pytest.raises(RuntimeError, match="http://127.0.0.1:1/health: no connection"):
        make_trainer(use_vllm=True, **server)


def test_settings_without_effect_are_reported(make_args):
    with pytest.warns(UserWarning, match="vllm_mode|vllm_server_port: no effect without use_vllm"):
        make_args(vllm_server_port=9000)
