"""Scripts written for TRL train here with nothing changed but the name in their imports."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import runpy
from pathlib import Path

import pytest

from grpo_trainer import GRPOTrainer
from tests.support.tools import call, make_small_policy, make_tool_tokenizer

HERE = Path(__file__).parent
SCRIPTS = ("arguments", "maths", "game")
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


def write(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(json.dumps(row) for row in rows))


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    tokenizer = make_tool_tokenizer(calls=(call("guess", number=1),))
    make_small_policy(len(tokenizer)).save_pretrained("model")
    tokenizer.save_pretrained("model")
    prompts = [{"prompt": f"Say {i}."} for i in range(8)]
    talks = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts]
    for split in ("train", "test"):
        write(Path("data", f"{split}.jsonl"), talks)
    problems = [{"problem": f"{i} + 1?", "solution": f"${i + 1}$"} for i in range(12)]
    write(Path("problems.jsonl"), problems)
    Path("run.yaml").write_text(RUN)

    def run(name: str, *words: str) -> GRPOTrainer:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words])
        return runpy.run_path(str(HERE / f"{name}.py"), run_name="__main__")["trainer"]

    return run


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_arguments_from_a_file(script):
    peft = pytest.importorskip("peft")
    trainer = script("arguments", "--config", "run.yaml", "--lora_alpha", "8", "--log_completions")
    assert isinstance(trainer.model, peft.PeftModel)
    adapter = trainer.model.peft_config["default"]
    assert (adapter.r, adapter.lora_alpha) == (4, 8) and trainer.args.log_completions
    assert trainer.reward_func_names == ["think_format_reward", "soft_overlong_punishment_reward"]
    assert len(logged(trainer, "reward")) == 2 and logged(trainer, "eval_reward")
    assert Path("arguments", "adapter_model.safetensors").is_file()


def test_rewards_by_import(script):
    pytest.importorskip("math_verify")
    trainer = script("maths")
    names = trainer.reward_func_names
    assert names[:2] == ["accuracy_reward", "think_format_reward"] and len(names) == 5
    assert isinstance(trainer, GRPOTrainer) and trainer.state.global_step == 2
    rewards = logged(trainer, "rewards/close_to_twenty/mean")
    assert len(rewards) == 1 and all(-1 <= reward <= 0 for reward in rewards)
    assert len(logged(trainer, "kl")) == 2
    assert Path("maths", "model.safetensors").is_file()
    assert logged(trainer, "rewards/accuracy_reward/mean") == [0.0]  # of two passes over a batch
    assert len(logged(trainer, "eval_rewards/accuracy_reward/mean")) == 2
    assert list(Path("maths", "completions").glob("*.parquet"))


def test_an_environment(script):
    trainer = script("game")
    assert trainer.state.global_step == 1
    assert [type(one).__name__ for one in trainer.environments] == ["GuessingGame"] * 16
    assert {one.secret for one in trainer.environments} <= {0, 1, 2}
    assert logged(trainer, "tools/call_frequency")[0] > 0
    assert logged(trainer, "rewards/reward_short/mean")[0] <= -1


@pytest.mark.parametrize("name", SCRIPTS)
def test_trl_has_all_that_they_import(name):
    """Nothing in a script but the name of the package is ours."""
    if importlib.util.find_spec("trl") is None:
        pytest.skip("no TRL here")
    tree = ast.parse((HERE / f"{name}.py").read_text())
    ours = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("grpo_trainer")
    ]
    assert ours
    for node in ours:
        theirs = importlib.import_module(str(node.module).replace("grpo_trainer", "trl"))
        missing = [alias.name for alias in node.names if not hasattr(theirs, alias.name)]
        assert missing == []
    text = (HERE / f"{name}.py").read_text()
    assert text.count("grpo_trainer") == len(ours)
