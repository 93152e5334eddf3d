"""W&B, offline, gets the table of completions next to the metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.hosts import need

need("wandb")

import wandb
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.support.vision import picture, tiny_model, tiny_processor

SETTINGS: dict[str, Any] = dict(
    max_steps=2, logging_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=4,
    num_generations=2, max_completion_length=3, save_strategy="no", eval_strategy="steps",
    eval_steps=2, bf16=False, use_cpu=True, disable_tqdm=True, log_completions=True,
    num_completions_to_print=0, write_report=False, gradient_checkpointing=False,
    report_to="wandb",
)  # fmt: skip


def lengths(completions: Any, log_extra: Any, **columns: Any) -> list[float]:
    log_extra("nested", [{"first": completion[0]["content"][:1]} for completion in completions])
    log_extra("mixed", [1.5, "two", None, [3]][: len(completions)])
    return [float(len(completion[0]["content"])) for completion in completions]


COLUMNS = {
    "prompt", "completion", "tokens", "truncated", "reward", "advantage", "nested", "mixed",
}  # fmt: skip


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    asked = [{"role": "user", "content": "bright?"}]
    rows = {"prompt": [asked] * 4, "image": [picture(60 * n) for n in range(4)]}
    dataset = Dataset.from_dict(rows)
    GRPOTrainer(
        tiny_model("llava"), lengths, GRPOConfig(output_dir=str(tmp_path / "out"), **SETTINGS),
        dataset, dataset.select(range(2)), processing_class=tiny_processor("llava"),
    ).train()  # fmt: skip
    assert wandb.run is not None
    media = Path(wandb.run.dir) / "media" / "table"
    wandb.finish()
    tables = [json.loads(path.read_text()) for path in media.glob("completions*.json")]
    assert len(tables) == 2 and len(list(media.glob("eval_completions*.json"))) == 1
    table = tables[0]
    assert set(table["columns"]) >= COLUMNS and "images" not in table["columns"]
    assert len(table["data"]) == 4
