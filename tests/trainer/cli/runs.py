"""A run of one step by the command line: its words, and what they name."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3ForSequenceClassification

from grpo_trainer.demo.policy import make_policy, make_tokenizer

REWARD = "grpo_trainer.demo.task.digits_reversal_reward"


def arguments(**changes: object) -> list[str]:
    """Return the words of a run of the model and the rows beside it; None leaves one out."""
    options = {
        "model_name_or_path": "model",
        "dataset_name": "rows.jsonl",
        "reward_funcs": REWARD,
        "output_dir": "out",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
    } | changes
    given = {name: value for name, value in options.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def write_module(name: str, text: str) -> None:
    """Write a module into the working directory."""
    Path(f"{name}.py").write_text(text)


def a_judge(folder: Path | str, labels: int) -> None:
    """Write a reward model with so many labels."""
    tokenizer = make_tokenizer()
    config = make_policy(tokenizer, seed=0).config
    config.num_labels = labels
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
