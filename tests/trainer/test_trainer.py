from __future__ import annotations

import copy
import functools

import pytest
import torch
from transformers import Qwen3ForCausalLM

from grpo_kernels import policy_loss
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from tests.support.trainer import CannedEngine, lengths_reward, parameters

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "weight_decay": 0.0}


def test_parameters_move_and_tokens_are_counted(make_trainer):
    trainer = make_trainer(gradient_checkpointing=True, eval_strategy="steps", eval_steps=2)
    before = parameters(trainer.model)
    trainer.train()
    assert not torch.equal(before, parameters(trainer.model))
    logs = [row for row in trainer.state.log_history if "loss" in row]
    assert len(logs) == 2 and "kl" not in logs[0]
    assert 4 * 2 < logs[0]["num_tokens"] < logs[1]["num_tokens"]
    [evaluation] = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert {"eval_loss", "eval_entropy", "eval_completions/mean_length"} <= set(evaluation)


def test_evaluate_returns_metrics(make_trainer):
    result = make_trainer(num_generations_eval=2).evaluate()
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


def test_step_is_the_formula(make_trainer, policy):
    """The first micro-batch's loss against log-probabilities of the model's own logits."""
    trainer = make_trainer(
        lengths_reward, copy.deepcopy(policy), CannedEngine(), max_steps=1, **SGD
    )
    trainer.train()
    [batch] = trainer._buffer
    logits = policy(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    tokens = batch.token_batch(1)
    logprobs = logits.log_softmax(-1).flatten(0, 1)[tokens.rows, :]
    logprobs = logprobs.gather(1, tokens.target[:, None])[:, 0]
    policy_loss(logprobs, tokens, trainer.loss_config).loss.backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().reshape(-1) for p in policy.parameters()])
    torch.testing.assert_close(parameters(trainer.model), expected, rtol=0, atol=2e-6)


def test_reference_of_a_patched_model(make_trainer, policy):
    policy.forward = functools.partial(policy.forward)
    for _ in range(2):
        with pytest.raises(ValueError, match="patched forward"):
            make_trainer(model=policy, beta=0.1)
        make_trainer(model=policy)  # which patches it once more


FULL = {"beta": 0.1, "bf16": True, "gradient_checkpointing": True}


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


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"num_iterations": 2}, True),
        ({"steps_per_generation": 2}, True),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, False),
    ],
)
def test_old_logprobs_only_when_the_policy_moves(make_trainer, changes, needed):
    trainer = make_trainer(max_steps=1, **changes)
    trainer.train()
    assert all((batch.old_logprobs is not None) == needed for batch in trainer._buffer)


def test_iterations_reuse_the_generation(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=4, learning_rate=3e-2)
    trainer.train()
    logs = [row for row in trainer.state.log_history if "ratio/max" in row]
    tokens = [row["num_tokens"] for row in logs]
    assert tokens[0] == tokens[1] < tokens[2] == tokens[3]
    assert logs[0]["ratio/max"] == pytest.approx(1, abs=1e-5)
    assert logs[1]["ratio/max"] > 1 + 1e-4
    assert "reward" in logs[0] and "reward" not in logs[1]


def test_slices_share_a_generation(make_trainer):
    seen = []

    def reward(prompts, **kwargs):
        seen.append(prompts)
        return [0.0] * len(prompts)

    make_trainer(reward, steps_per_generation=2, max_steps=4, num_generations=4).train()
    assert [len(prompts) for prompts in seen] == [8, 8]
    assert all(len(set(prompts)) == 2 for prompts in seen)


def test_conversational_prompts(make_trainer, chat_dataset):
    seen = {}

    def reward(prompts, completions, answer, trainer_state, completion_ids, **kwargs):
        seen.update(prompts=prompts, completions=completions, step=trainer_state.global_step)
        return [float(len(item[0]["content"])) for item in completions]

    make_trainer(reward, train_dataset=chat_dataset).train()
    assert seen["prompts"][0][0]["role"] == "user"
    assert seen["completions"][0][0]["role"] == "assistant"
    assert seen["step"] == 1


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


def test_truncated_completions_leave_the_loss(make_trainer):
    trainer = make_trainer(
        lengths_reward, engine=CannedEngine(), mask_truncated_completions=True, max_steps=1
    )
    trainer.train()
    [batch] = trainer._buffer
    eos = trainer.processing_class.eos_token_id
    ended = (batch.input_ids == eos).any(1)
    assert ended.any() and not ended.all()
    assert torch.equal((batch.target != -100).any(1), ended)
    assert batch.num_items == (batch.target != -100).sum()


def test_long_prompts_lose_their_beginning(make_trainer):
    trainer = make_trainer(lengths_reward, engine=CannedEngine(), max_prompt_length=2, max_steps=1)
    trainer.train()
    [batch] = trainer._buffer
    assert (batch.target[:, 0] == -100).all()
    assert batch.attention_mask.sum(1).max() <= 2 + 4


def test_padding_to_a_multiple(make_trainer):
    trainer = make_trainer(pad_to_multiple_of=16, max_steps=1)
    trainer.train()
    assert trainer._buffer[0].input_ids.shape[1] == 16


def test_unscored_completions(make_trainer, caplog):
    trainer = make_trainer(lambda completions, **kwargs: [None] * len(completions), max_steps=1)
    trainer.train()
    assert "returned None for 4 of 4" in caplog.text
    assert trainer._buffer[0].advantages.tolist() == [0.0] * 4
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["loss"] == 0 and "reward" not in log


def test_streaming_datasets(make_trainer, dataset):
    seen = []

    def reward(prompts, answer, **kwargs):
        seen.append(list(zip(prompts, answer, strict=True)))
        return [0.0] * len(prompts)

    rows = dataset.to_iterable_dataset()
    changes = {"num_generations": 2, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
    trainer = make_trainer(reward, train_dataset=rows, eval_dataset=rows.take(3), **changes)
    trainer.train()
    assert trainer.state.epoch == 1
    expected = [(row["prompt"], row["answer"]) for row in dataset for _ in range(2)]
    assert [row for batch in seen[:3] for row in batch] == expected[:12]
    assert [row for batch in seen[3:] for row in batch] == expected[:6]
    [evaluation] = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert evaluation["eval_loss"] == 0


def test_dataset_order(make_trainer):
    seen = []

    def reward(prompts, **kwargs):
        seen.append(prompts[0])
        return [0.0] * len(prompts)

    make_trainer(reward, shuffle_dataset=False, max_steps=3).train()
    assert seen == ["000=", "037=", "074="]


def test_each_micro_batch_has_the_length_of_its_longest_row(make_trainer):
    trainer = make_trainer(
        lengths_reward, engine=CannedEngine(), steps_per_generation=8, num_generations=4
    )
    trainer.train()
    assert len(trainer._buffer) == 8
    lengths = {batch.input_ids.shape[1] for batch in trainer._buffer}
    assert len(lengths) > 1
    for batch in trainer._buffer:
        assert batch.input_ids.shape[1] == batch.attention_mask.sum(1).max()
        assert batch.num_tokens == (batch.target != -100).sum()


def test_group_size_in_evaluation(make_trainer):
    sizes = []

    def reward(prompts, trainer_state, **kwargs):
        sizes.append([len(prompts), len(set(prompts))])
        return [0.0] * len(prompts)

    changes = {"generation_batch_size": 8, "num_generations_eval": 2, "eval_strategy": "steps"}
    make_trainer(reward, **changes, eval_steps=2, max_steps=2).train()
    assert sizes == [[8, 2], [4, 2], [4, 2]]


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
