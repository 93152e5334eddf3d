"""W&B and trackio, both offline, get the table of completions beside the metrics."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.hosts import need

need("trackers")
os.environ["TRACKIO_DIR"] = tempfile.mkdtemp()  # read when it is imported

import wandb
from datasets import Dataset
from trackio.sqlite_storage import SQLiteStorage

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.support.vision import picture, tiny_model, tiny_processor

SETTINGS: dict[str, Any] = dict(
    max_steps=2, logging_steps=1, per_device_train_batch_size=4, per_device_eval_batch_size=4,
    num_generations=2, max_completion_length=3, save_strategy="no", eval_strategy="steps",
    eval_steps=2, bf16=False, use_cpu=True, disable_tqdm=True, log_completions=True,
    num_completions_to_print=0, write_report=False, gradient_checkpointing=False,
)  # fmt: skip


def lengths(completions: Any, log_extra: Any, **columns: Any) -> list[float]:
    log_extra("first", [completion[0]["content"][:1] for completion in completions])
    log_extra("mixed", [1.5, "two", None, [3]][: len(completions)])
    return [float(len(completion[0]["content"])) for completion in completions]


def train(tracker: str, folder: Path, **changes: Any) -> None:
    asked = [{"role": "user", "content": "bright?"}]
    rows = {"prompt": [asked] * 4, "image": [picture(60 * n) for n in range(4)]}
    args = GRPOConfig(output_dir=str(folder), report_to=tracker, **(SETTINGS | changes))
    dataset = Dataset.from_dict(rows)
    GRPOTrainer(
        tiny_model("llava"), lengths, args, dataset, dataset.select(range(2)),
        processing_class=tiny_processor("llava"),
    ).train()  # fmt: skip


COLUMNS = {
    "prompt", "image 1", "completion", "tokens", "truncated", "reward", "advantage", "first",
    "mixed",
}  # fmt: skip


def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    train("wandb", tmp_path / "out")
    assert wandb.run is not None
    media = Path(wandb.run.dir) / "media" / "table"
    wandb.finish()
    tables = [json.loads(path.read_text()) for path in media.glob("completions*.json")]
    assert len(tables) == 2 and len(list(media.glob("eval_completions*.json"))) == 1
    table = tables[0]
    assert set(table["columns"]) >= COLUMNS
    assert len(table["data"]) == 4
    assert table["data"][0][table["columns"].index("image 1")] == "Image"  # offline


def test_trackio(tmp_path: Path) -> None:
    train("trackio", tmp_path / "out", log_unique_prompts=True, project="bright")
    [run] = SQLiteStorage.get_runs("bright")[-1:]
    logged = SQLiteStorage.get_logs("bright", run)
    tables = [row["completions"] for row in logged if "completions" in row]
    assert len(tables) == 2 and sum("eval_completions" in row for row in logged) == 1
    rows = tables[0]["_value"]
    assert set(rows[0]) >= COLUMNS and len(rows) == 2
    assert any("train/reward" in row for row in logged)
