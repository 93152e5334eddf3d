"""A script written for TRL trains here with nothing changed but the name in its imports."""

from __future__ import annotations

import ast
import importlib
import json
import runpy
from pathlib import Path

import pytest

from grpo_trainer import GRPOTrainer
from tests.support.tools import make_small_policy, make_tool_tokenizer

SCRIPT = Path(__file__).with_name("arguments.py")
RUN = """
model_name_or_path: model
dataset_name: data
reward_funcs: [format, length]
output_dir: arguments
use_peft: true
lora_r: 4
lora_target_modules: [all-linear]
num_generations: 2
per_device_train_batch_size: 4
per_device_eval_batch_size: 4
max_completion_length: 8
max_steps: 2
learning_rate: 1e-3
logging_steps: 1
save_strategy: 'no'
eval_strategy: steps
report_to: [none]
use_cpu: true
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tool_tokenizer()
    make_small_policy(len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    Path("data").mkdir()
    talks = [{"prompt": [{"role": "user", "content": f"Say {i}."}]} for i in range(8)]
    for split in ("train", "test"):
        Path("data", f"{split}.jsonl").write_text("\n".join(map(json.dumps, talks)))
    Path("run.yaml").write_text(RUN)

    def run(*words: str) -> GRPOTrainer:
        monkeypatch.setattr("sys.argv", [SCRIPT.name, *words])
        return runpy.run_path(str(SCRIPT), run_name="__main__")["trainer"]

    return run


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_arguments_from_a_file(script):
    peft = pytest.importorskip("peft")
    trainer = script("--config", "run.yaml", "--lora_alpha", "8", "--log_completions")
    assert isinstance(trainer.model, peft.PeftModel)
    adapter = trainer.model.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha) == (4, 8) and trainer.args.log_completions
    assert trainer.reward_func_names == ["think_format_reward", "soft_overlong_punishment_reward"]
    assert len(logged(trainer, "reward")) == 2 and logged(trainer, "eval_reward")
    assert Path("arguments", "adapter_model.safetensors").is_file()


def test_trl_has_all_that_it_imports():
    """Nothing in the script but the name of the package is ours."""
    pytest.importorskip("trl")
    tree = ast.parse(SCRIPT.read_text())
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("grpo_trainer")
    ]
    assert SCRIPT.read_text().count("grpo_trainer") == len(ours) > 0
    for node in ours:
        theirs = importlib.import_module(str(node.module).replace("grpo_trainer", "trl"))
        assert [alias.name for alias in node.names if not hasattr(theirs, alias.name)] == []
