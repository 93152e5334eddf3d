"""Training on completions with tool calls: what is in the loss, what is logged, docs that run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.support.batches import BatchTrainer
from tests.support.documents import DOCS, python_block, with_settings
from tests.support.tools import (
    ScriptedEngine,
    add,
    call,
    make_small_policy,
    make_tool_tokenizer,
    make_trainer,
    once,
    question,
    results,
)
from tests.support.trainer import parameters

ROWS = Dataset.from_list([{"prompt": question(str(n))} for n in range(8)])


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


def test_a_policy_that_calls_by_itself(make_args, tmp_path):
    """The policy's own samples: a whole call is one token, which random weights draw by chance."""
    whole = call("add", a=2, b=3)
    tokenizer = make_tool_tokenizer(calls=(whole,))
    [token] = tokenizer.encode(whole)
    policy = make_small_policy(len(tokenizer))
    seen = []

    def calls(completions, completion_ids, **kwargs):
        seen.extend(completions)
        return [float(ids.count(token)) for ids in completion_ids]

    args = make_args(
        max_steps=1, max_completion_length=200, per_device_train_batch_size=16,
        log_completions=True,
        generation_kwargs={"sequence_bias": [[[tokenizer.eos_token_id], 3.0], [[token], 3.0]]},
    )  # fmt: skip
    before = parameters(policy)
    trainer = BatchTrainer(policy, calls, args, ROWS, processing_class=tokenizer, tools=[add])
    trainer.train()
    assert not torch.equal(parameters(policy), before)
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["tools/call_frequency"] > 0.2 and log["tools/failure_frequency"] == 0
    answered = [messages for messages in seen if len(messages) > 2]
    assert answered
    for messages in answered:
        wanted = len(messages[0]["tool_calls"])
        assert [message["content"] for message in messages[1 : wanted + 1]] == ["5"] * wanted
        assert messages[wanted + 1]["role"] == "assistant"
    [file] = (tmp_path / "out" / "completions").glob("completions_*.parquet")
    shown = Dataset.from_parquet(str(file))["completion"]
    assert any('"name": "add"' in text and "tool: 5" in text for text in shown)
    [batch] = trainer.batches
    assert torch.equal(batch.target < 0, tool_positions(trainer, batch) | _padding(batch))


def test_a_teacher_with_fewer_ids(make_args):
    """The ids that the policy may not sample because of it are no tokens that tools could say."""
    tokenizer = make_tool_tokenizer()
    size = len(tokenizer)

    def reward(completions, **kwargs):
        return [float(row) for row in range(len(completions))]

    args = make_args(max_steps=1, max_completion_length=200, distillation="logprobs")
    trainer = GRPOTrainer(
        make_small_policy(size + 20), reward, args, ROWS, processing_class=tokenizer, tools=[add],
        teacher=make_small_policy(size + 10),
        rollout_engine=ScriptedEngine(tokenizer, once(call("add", a=2, b=3))),
    )  # fmt: skip
    trainer.train()
    [log] = [row for row in trainer.state.log_history if "loss" in row]
    assert log["tools/call_frequency"] == 1 and log["tools/failure_frequency"] == 0


def _padding(batch):
    """Return the positions that predict nothing, at the end of each row."""
    real = batch.attention_mask.bool()
    return ~torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)


TINY = 'output_dir="out", max_steps=1, use_cpu=True, report_to="none", logging_steps=1, '
TINY += "save_strategy='no', max_completion_length=300"


def block(mentioning: str) -> str:
    return with_settings(python_block(DOCS, mentioning), TINY)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a block with a scripted engine in the trainer; return what the run logged."""
    monkeypatch.chdir(tmp_path)

    def execute(code: str, script: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
        def trainer(model: str, args: GRPOConfig, train_dataset: Dataset, **arguments: Any):
            assert model == "path/to/model"
            return make_trainer(args, train_dataset, script, **arguments)

        names: dict[str, Any] = {
            "GRPOConfig": GRPOConfig,
            "GRPOTrainer": trainer,
            "dataset": Dataset.from_list(rows),
            "right_answer": lambda completions, **kwargs: [
                float("6" in messages[-1]["content"]) for messages in completions
            ],
        }
        exec(code, names)
        names["trainer"].train()
        return names["trainer"].state.log_history[0]

    return execute


def test_tools(run):
    def script(text):
        return results(text)[0] if results(text) else call("multiply", a=2, b=3)

    log = run(block("def multiply"), script, [{"prompt": question()}])
    assert log["reward"] == 1 and log["tools/call_frequency"] == 1


def test_environment(run):
    def script(text):
        assert "It has two digits." in text
        found = results(text)
        return "ok" if "right" in found else call("guess", number=40 + 2 * len(found))

    log = run(block("class Guess:"), script, [{"prompt": question(), "number": 42}])
    assert log["rewards/Guess/mean"] == 1 and log["tools/call_frequency"] == 2


def test_rollout_function(run):
    log = run(block("def rollout"), lambda text: "<think>a</think>b", [{"prompt": "q"}])
    assert log["reward"] == 1


def test_curriculum():
    names: dict[str, Any] = {"GRPOConfig": lambda **k: GRPOConfig(**k)}
    exec(block("def curriculum"), names)
    answer = names["args"].dynamic_prompts_fn(["a", "b"], ["", ""], [1.0, 0.0], [{}, {}])
    assert answer == ["a Be brief.", "b Hint: think step by step."]
