"""The Python blocks of docs/trainer.md on tools, environments, rollouts and curricula run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from grpo_trainer import GRPOConfig
from tests.support.tools import call, make_trainer, question, results

TEXT = (Path(__file__).parents[3] / "docs" / "trainer.md").read_text()
TINY = 'output_dir="out", max_steps=1, use_cpu=True, report_to="none", logging_steps=1, '
TINY += "save_strategy='no', max_completion_length=300"


def block(mentioning: str) -> str:
    (found,) = [
        part for part in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if mentioning in part
    ]
    return found.replace('output_dir="out"', TINY)


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

    log = run(block("class Guess"), script, [{"prompt": question(), "number": 42}])
    assert log["rewards/Guess/mean"] == 1 and log["tools/call_frequency"] == 2


def test_rollout_function(run):
    log = run(block("def rollout"), lambda text: "<think>a</think>b", [{"prompt": "q"}])
    assert log["reward"] == 1


def test_curriculum():
    names: dict[str, Any] = {"GRPOConfig": lambda **k: GRPOConfig(**k)}
    exec(block("def curriculum"), names)
    answer = names["args"].dynamic_prompts_fn(["a", "b"], ["", ""], [1.0, 0.0], [{}, {}])
    assert answer == ["a Be brief.", "b Hint: think step by step."]
