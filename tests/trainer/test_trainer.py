from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from grpo_trainer.demo.policy import make_policy, make_tokenizer
from tests.support.batches import BatchTrainer
from tests.support.trainer import CannedEngine, lengths_reward, parameters

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "weight_decay": 0.0}


def test_evaluate_returns_metrics(make_trainer):
    result = make_trainer(num_generations_eval=2).evaluate()
    assert {"eval_loss", "eval_entropy", "eval_completions/mean_length"} <= set(result)
    assert 0 <= result["eval_reward"] <= 1
    assert result["eval_rewards/digits_reversal_reward/mean"] == result["eval_reward"]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo"])
def test_gradient_accumulation_equals_one_batch(make_trainer, policy, loss_type):
    def after_one_step(**batch) -> torch.Tensor:
        trainer = make_trainer(
            lengths_reward, copy.deepcopy(policy), CannedEngine(), max_steps=1, loss_type=loss_type,
            **SGD, **batch,
        )  # fmt: skip
        trainer.train()
        return parameters(trainer.model)

    whole = after_one_step(per_device_train_batch_size=8)
    halves = after_one_step(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    moved = (whole - parameters(policy)).abs().max()
    assert moved > 1e-3
    assert (whole - halves).abs().max() < 1e-5 * moved + 1e-7


def test_reference_of_a_patched_model(make_trainer, policy):
    policy.forward = functools.partial(policy.forward)
    for _ in range(2):
        with pytest.raises(ValueError, match="patched forward"):
            make_trainer(model=policy, beta=0.1)
        make_trainer(model=policy)  # which patches it once more


FULL = {"beta": 0.1, "bf16": True, "gradient_checkpointing": True}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [({}, FULL), (FULL, FULL), (FULL, {})])
def test_one_model_in_a_second_trainer(make_trainer, policy, first, then):
    make_trainer(model=policy, **first).train()
    fresh = Qwen3ForCausalLM(policy.config)
    fresh.load_state_dict(policy.state_dict())
    start = parameters(policy)
    logs = []
    for model in (policy, fresh):
        trainer = make_trainer(lengths_reward, model, seed=7, **then)
        trainer.train()
        logs.append([(row.get("loss"), row.get("kl")) for row in trainer.state.log_history])
        if "beta" in then:
            assert torch.equal(parameters(trainer.ref_model), start) and logs[-1][1][1] > 0
    assert torch.equal(parameters(policy), parameters(fresh)) and logs[0] == logs[1]
    assert policy.dtype == torch.float32  # of the weights, whatever they are multiplied in
    assert not torch.equal(parameters(policy), start)


def test_a_response_template_reads_completions(make_trainer, chat_tokenizer, chat_dataset):
    chat_tokenizer.response_template = {
        "start_anchor": "=",
        "fields": {
            "reasoning_content": {"open": "9", "close": "8", "content": "text"},
            "content": {"close": "<eos>", "content": "text"},
        },
    }
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(completions)
        return [0.0] * len(completions)

    changes = {"max_steps": 1, "shuffle_dataset": False, "train_dataset": chat_dataset}
    make_trainer(reward, engine=CannedEngine(), **changes).train()
    assert [message["content"] for [message] in seen] == ["383", "5050", "7", ""]
    assert seen[3][0]["reasoning_content"] == "4" and "reasoning_content" not in seen[0][0]


def test_logged_loss_is_the_mean_of_the_steps(make_trainer):
    def losses(every: int) -> list[float]:
        model = make_policy(make_tokenizer(), seed=0)
        trainer = make_trainer(
            lengths_reward, model, CannedEngine(), logging_steps=every, max_steps=4
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    single = losses(1)
    assert losses(4) == [pytest.approx(sum(single) / 4)]


@pytest.mark.parametrize("multiple", [1, 16])
def test_each_micro_batch_has_the_length_of_its_longest_row(make_trainer, multiple):
    trainer = make_trainer(
        lengths_reward, engine=CannedEngine(), kind=BatchTrainer, steps_per_generation=8,
        num_generations=4, max_steps=8, pad_to_multiple_of=multiple, packing="padded",
    )  # fmt: skip
    trainer.train()
    longest = [batch.attention_mask.sum(1).max().item() for batch in trainer.batches]
    assert len(longest) == 8 and len(set(longest)) > 1
    widths = [batch.input_ids.shape[1] for batch in trainer.batches]
    assert widths == [math.ceil(length / multiple) * multiple for length in longest]


def test_unscored_completions(make_trainer, caplog):
    trainer = make_trainer(lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    trainer.train()
    assert "returned None or NaN for 4 of 4" in caplog.text
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["loss"] == log["grad_norm"] == 0 and "reward" not in log
