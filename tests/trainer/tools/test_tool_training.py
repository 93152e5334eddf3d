"""Training on completions with tool calls: what is in the loss, and what is logged."""

from __future__ import annotations

import copy

import pytest
import torch
from datasets import Dataset

from grpo_kernels import policy_loss
from tests.support.batches import BatchTrainer
from tests.support.tools import (
    ScriptedEngine,
    add,
    call,
    make_small_policy,
    make_tool_tokenizer,
    question,
    results,
)
from tests.support.trainer import parameters

SGD = {"optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "weight_decay": 0.0}


def script(text: str, row: int) -> str:
    """Call as often as the prompt's first digit says; every fourth call fails."""
    wanted, done = int(text.split("user\n")[1][0]), len(results(text))
    if done == wanted:
        return "sum " + str(len(text) * row % 7)
    return call("add", a=done, b=1) if done % 4 < 3 else call("gone")


def reward(completions, completion_ids, **kwargs):
    return [float(row % 3 + len(ids) % 5) for row, ids in enumerate(completion_ids)]


@pytest.fixture
def make(make_args):
    tokenizer = make_tool_tokenizer()
    rows = Dataset.from_list([{"prompt": question(f"{n % 3}{n}")} for n in range(8)])
    policy = make_small_policy(len(tokenizer))

    def trainer(**changes):
        logprobs = changes.pop("logprobs", False)
        settings = {"max_completion_length": 250, "shuffle_dataset": False} | changes
        return BatchTrainer(
            copy.deepcopy(policy), reward, make_args(**settings), rows, rows.select(range(3)),
            tokenizer, tools=[add],
            rollout_engine=ScriptedEngine(tokenizer, script, logprobs, by_row=True),
        )  # fmt: skip

    trainer.policy = policy
    return trainer


def tool_positions(trainer, batch):
    """Return (B, L), true where ``target`` would be a token of the template or a tool."""
    marks = trainer.processing_class.convert_tokens_to_ids(["<|start|>", "<|end|>"])
    inside = torch.zeros_like(batch.target, dtype=torch.bool)
    for row, ids in enumerate(batch.input_ids.tolist()):
        by_policy = False
        for index, token in enumerate(ids):
            inside[row, index - 1] = not by_policy
            if token == marks[1]:
                by_policy = False
            header = trainer.processing_class.decode(ids[max(index - 10, 0) : index + 1])
            by_policy = by_policy or header.endswith("<|start|>assistant\n"[-11:])
    return inside


@pytest.mark.parametrize("loss_type", ["dapo", "gspo"])
def test_step_is_the_formula_of_the_policys_tokens(make, loss_type):
    """Log-probabilities of the model's own logits, at the positions of its own tokens alone.

    Those that engines report are NaN at the tools' tokens.
    """
    trainer = make(max_steps=1, loss_type=loss_type, logprobs=True, per_device_train_batch_size=8,
                   vllm_importance_sampling_mode="token_truncate", **SGD)  # fmt: skip
    trainer.train()
    [batch] = trainer.batches
    outside = tool_positions(trainer, batch)
    assert outside[:, :-1].any() and torch.equal(batch.target < 0, outside)
    policy = make.policy
    logits = policy(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    tokens = batch.token_batch(1)
    assert tokens.num_tokens == int((~outside).sum()) == int(batch.num_items)
    logprobs = logits.log_softmax(-1).flatten(0, 1)[tokens.rows, :]
    logprobs = logprobs.gather(1, tokens.target[:, None])[:, 0]
    policy_loss(logprobs, tokens, trainer.loss_config).loss.backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().reshape(-1) for p in policy.parameters()])
    assert (expected - parameters(policy)).abs().max() > 1e-4
    torch.testing.assert_close(parameters(trainer.model), expected, rtol=0, atol=2e-6)


def test_what_is_logged(make, tmp_path):
    trainer = make(
        max_steps=1, eval_strategy="steps", eval_steps=1, log_completions=True,
        per_device_train_batch_size=12, num_generations_eval=2,
    )  # fmt: skip
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    [evaluation] = [row for row in trainer.state.log_history if "eval_reward" in row]
    assert evaluation["eval_tools/call_frequency"] == 1.0
    [file] = (tmp_path / "out" / "completions").glob("completions_*.parquet")
    completions = Dataset.from_parquet(str(file))["completion"]
    assert any('"name": "add"' in text and "tool: 1" in text for text in completions)


def test_a_policy_that_calls_by_itself(make_args):
    """The policy's own samples: a whole call is one token, which random weights draw by chance."""
    whole = call("add", a=2, b=3)
    tokenizer = make_tool_tokenizer(calls=(whole,))
    [token] = tokenizer.encode(whole)
    policy = make_small_policy(len(tokenizer))
    seen = []

    def calls(completions, completion_ids, **kwargs):
        seen.extend(completions)
        return [float(ids.count(token)) for ids in completion_ids]

    rows = Dataset.from_list([{"prompt": question(str(n))} for n in range(8)])
    args = make_args(
        max_steps=1, max_completion_length=200, per_device_train_batch_size=16,
        generation_kwargs={"sequence_bias": [[[tokenizer.eos_token_id], 3.0], [[token], 3.0]]},
    )  # fmt: skip
    before = parameters(policy)
    trainer = BatchTrainer(policy, calls, args, rows, processing_class=tokenizer, tools=[add])
    trainer.train()
    assert not torch.equal(parameters(policy), before)
    assert trainer.state.log_history[0]["tools/call_frequency"] > 0.2
    answered = [messages for messages in seen if len(messages) > 2]
    assert answered
    for messages in answered:
        wanted = len(messages[0]["tool_calls"])
        assert [message["content"] for message in messages[1 : wanted + 1]] == ["5"] * wanted
        assert messages[wanted + 1]["role"] == "assistant"
    [batch] = trainer.batches
    assert torch.equal(batch.target < 0, tool_positions(trainer, batch) | _padding(batch))


def _padding(batch):
    """Return the positions that predict nothing, at the end of each row."""
    real = batch.attention_mask.bool()
    return ~torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)


def test_truncated_completions_leave_the_loss(make):
    trainer = make(max_steps=1, max_completion_length=90, mask_truncated_completions=True,
                   per_device_train_batch_size=12)  # fmt: skip
    trainer.train()
    [batch] = trainer.batches
    # one call does not leave room for its answer
    assert (batch.target >= 0).any(1).tolist() == [True] * 4 + [False] * 8


def test_overlap_is_refused(make):
    with pytest.raises(ValueError, match="overlap_generation: expected False with tools"):
        make(overlap_generation=True)
