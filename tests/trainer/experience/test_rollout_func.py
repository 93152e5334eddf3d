"""Completions by a user's function: what it gets, what becomes of it, and what is refused."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace

import pytest
import torch

from grpo_trainer.data import Sample
from grpo_trainer.engines import EngineContext, Sampler, Sampling
from grpo_trainer.experience import ByFunction
from tests.support.trainer import BackgroundEngine, parameters


def rollout(prompts, trainer):
    """Return two tokens of the policy and two of somebody else."""
    count = len(prompts)
    ids = [[3 + row, 4, 5, 1] for row in range(count)]
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": ids,
        "logprobs": [[-1.0, None, -1.0, float("nan")]] * count,
        "env_mask": [[1, 0, 1, 0]] * count,
        "steps": [row * 10 for row in range(count)],
    }


@pytest.fixture
def train(make_trainer, policy):
    def run(function, reward=None, **changes):
        def rows(prompts, **kwargs):
            return [float(row % 2) for row, _ in enumerate(prompts)]

        changes = {"max_steps": 1, "rollout_func": function} | changes
        trainer = make_trainer(reward or rows, copy.deepcopy(policy), **changes)
        trainer.train()
        return trainer

    return run


def test_masks_log_probabilities_and_extra_columns(train):
    seen = {}

    def reward(prompts, completions, completion_ids, steps, answer, **kwargs):
        seen.update(steps=steps, completions=completions, ids=completion_ids, prompts=prompts)
        return [float(step) for step in steps]

    trainer = train(rollout, reward)
    assert seen["steps"] == [0, 10, 20, 30] and len(set(seen["prompts"])) == 1
    assert seen["ids"][0] == [3, 4, 5, 1] and len(seen["completions"]) == 4
    [batch] = trainer._buffer.batches
    target = [[token for token in row if token >= 0] for row in batch.target.tolist()]
    assert target == [[3 + row, 5] for row in range(4)] and batch.num_items == 8
    known = batch.rollout_logprobs[batch.target >= 0]
    assert torch.equal(known, torch.full((8,), -1.0))
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert "profiling/generate" in log  # the time of the function, not of the rewards
    assert log["completions/mean_length"] == 2 and log["rewards/reward/mean"] == 15
    assert log["completions/clipped_ratio"] == 0


@pytest.mark.parametrize(
    ("given", "candidates"),
    [
        ([[-1.0], [None], -2.0, [float("nan")]], None),
        (
            # the likeliest ids come first; that of the second token is not among them
            [[-0.1, -1.0], [-0.3, -0.4], [-2.0], [None, -0.5]],
            lambda row: [[9, 3 + row], [8, 9], [5], [1, 9]],
        ),
    ],
)
def test_log_probabilities_in_a_list_per_token(train, given, candidates):
    def nested(prompts, trainer):
        answer = rollout(prompts, trainer) | {"logprobs": [given] * len(prompts)}
        if candidates is not None:
            answer["logprob_token_ids"] = [candidates(row) for row in range(len(prompts))]
        return answer

    [batch] = train(nested)._buffer.batches
    known = batch.rollout_logprobs[batch.target >= 0].reshape(4, 2)
    assert torch.equal(known, torch.tensor([[-1.0, -2.0]] * 4))


@pytest.mark.parametrize(
    ("reported", "sharpness", "changes", "doubt"),
    [
        (0.0, 1, {}, "reports 0 for every token, .* are -2.[0-9]* on average; report None"),
        (0.0, 1, {"bypass_mode": True}, "reports 0 for every token"),
        (-9.0, 1, {}, "reports numbers that differ from the policy's by 6.[0-9]* on average"),
        (0.0, 1, {"top_p": 0.9}, "reports 0 for every token"),  # which may raise them by 0.11
        (0.0, 1, {"top_p": 0.05}, None),
        (0.0, 1, {"top_k": 1}, None),  # every token is certain
        (0.0, 1, {"vllm_importance_sampling_correction": False}, None),
        (None, 1, {}, None),
        (None, 20, {}, None),
        (0.0, 1e6, {}, None),  # every token was certain
    ],
)
def test_impossible_log_probabilities(
    train, policy, tokenizer, caplog, reported, sharpness, changes, doubt
):
    with torch.no_grad():
        policy.lm_head.weight.mul_(sharpness)
    engine = BackgroundEngine(tokenizer, copy.deepcopy(policy))

    def placeholder(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        drawn = trainer.rollouts.generate(ids).token_ids
        values = [[reported] * len(row) for row in drawn]
        if reported is None:
            pairs = zip(ids, drawn, strict=True)
            values = [engine._logprobs(*pair, trainer.args) for pair in pairs]
        return {"prompt_ids": ids, "completion_ids": drawn, "logprobs": values}

    train(placeholder, max_steps=2, learning_rate=0.0, **changes)
    found = [row.getMessage() for row in caplog.records if "log-probabilities: " in row.message]
    assert len(found) == (doubt is not None) and all(re.search(doubt, text) for text in found)


@pytest.mark.parametrize(("env_mask", "target"), [([1, 0, 1, 0], [1, 5]), (None, [1, 4, 5, 1])])
def test_turns_may_be_joined(train, env_mask, target):
    mask = None if env_mask is None else [env_mask] * 4
    trainer = train(changed(completion_ids=[[1, 4, 5, 1]] * 4, env_mask=mask))
    [batch] = trainer._buffer.batches
    assert [row[row >= 0].tolist() for row in batch.target] == [target] * 4


def test_the_function_can_use_the_engine(train, policy):
    def engine(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        drawn = trainer.rollouts.generate(ids, 3)
        return {"prompt_ids": ids, "completion_ids": drawn.token_ids, "logprobs": None}

    trainer = train(engine)
    assert trainer._buffer.batches[0].rollout_logprobs is None
    assert trainer._buffer.batches[0].target.ge(0).sum(1).max() <= 3
    assert not torch.equal(parameters(trainer.model), parameters(policy))


def test_evaluation_and_groups(train):
    asked = []

    def counted(prompts, trainer):
        asked.append((len(prompts), len(set(prompts)), trainer.model.training))
        return rollout(prompts, trainer)

    train(counted, num_generations_eval=2, eval_strategy="steps", eval_steps=1)
    assert asked == [(4, 1, True), (4, 2, False), (4, 2, False)]


def without(*names):
    return lambda p, t: {k: v for k, v in rollout(p, t).items() if k not in names}


def changed(**values):
    return lambda p, t: rollout(p, t) | values


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (without("prompt_ids", "logprobs"), "a dictionary without prompt_ids, logprobs"),
        (lambda p, t: [1], "expected a dictionary, got list"),
        (changed(completion_ids=[[3]] * 3), "expected 4 entries in 'completion_ids', .* got 3"),
        (changed(prompt_ids=[["a"]] * 4), "expected prompt_ids 0 <= id < 14, got 'a'"),
        (changed(prompt_ids=[[]] * 4), "a prompt of at least one token, got none"),
        (changed(completion_ids=[[3, 14]] * 4), "expected completion_ids 0 <= id < 14, got 14"),
        (changed(completion_ids=[3] * 4), "expected a list of completion_ids, got 3"),
        (changed(logprobs=[[0.0] * 3] * 4), "one value of 'logprobs' per token, got 3 for 4"),
        (changed(logprobs=[[0.5] * 4] * 4), "log-probabilities of at most 0, got 0.5"),
        (changed(completion_ids=[[]] * 4, logprobs=None, env_mask=None), "1 to 4 tokens, got 0"),
        (changed(logprobs=[[[0.0, -1.0]] * 4] * 4), "'logprob_token_ids' .* got None for"),
        (
            changed(logprobs=[[[0.0, -1.0]] * 4] * 4, logprob_token_ids=[[[3]] * 4] * 4),
            r"one id in 'logprob_token_ids' for each .* got \[3\] for",
        ),
        (changed(env_mask=[[1] * 4] * 3 + [[1]]), "ion 3: .* 'env_mask' per token, got 1 for 4"),
        (changed(logprobs=[0.0] * 4), "'logprobs' per token, got float for 4"),
        (changed(steps=3), "expected 4 entries in 'steps', one per prompt, got int"),
        (changed(prompts=[""] * 4), "another column name than 'prompts'"),
        (changed(completion_ids=[[3] * 5] * 4, logprobs=None, env_mask=None), "4 tokens, got 5"),
        (changed(prompt_ids=[[3] * 61] * 4), "at most 64 tokens in prompt and .*, got 65"),
    ],
)
def test_wrong_answers(make_args, tokenizer, function, message):
    trainer = SimpleNamespace(processing_class=tokenizer)
    context = EngineContext(
        policy=None, processing_class=tokenizer, args=make_args(), accelerator=None,
        positions=64, vocab_size=14,
    )  # fmt: skip
    sampling = Sampling.from_config(context.args, tokenizer)
    sampler = Sampler(None, context, sampling, step=lambda: 0, name="none")
    with pytest.raises(ValueError, match=f"rollout_func: .*{message}"):
        ByFunction(lambda p: function(p, trainer), sampler, context)([Sample("12=")] * 4)
