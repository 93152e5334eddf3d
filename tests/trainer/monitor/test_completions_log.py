"""The table of completions: what reward functions add, and one row per prompt on request."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy
import pytest
from datasets import Dataset
from pyarrow import parquet

from grpo_trainer.monitor import OWN_COLUMNS
from tests.support.documents import DOCS, run_block
from tests.support.trainer import CannedEngine


@pytest.mark.parametrize("unique", [False, True])
def test_extra_columns_and_unique_prompts(make_trainer, unique):
    def digits(prompts, completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(text) for text in completions])
        log_metric("longest", max(len(text) for text in completions))
        return [float(len(text)) for text in completions]

    trainer = make_trainer(
        digits,
        log_completions=True,
        log_unique_prompts=unique,
        max_steps=1,
        gradient_accumulation_steps=2,
        eval_strategy="steps",
        eval_steps=1,
    )
    trainer.train()
    folder = Path(trainer.args.output_dir) / "completions"
    table, evaluated = (
        Dataset.from_parquet(str(folder / f"{name}_00001.parquet"))
        for name in ("completions", "eval_completions")
    )
    prompts = table["prompt"]
    assert len(table) == (2 if unique else 8) and len(set(prompts)) == 2
    assert len(evaluated) == (4 if unique else 16) and len(set(evaluated["prompt"])) == 4
    assert table["length"] == table["reward"] == table["rewards/digits"]
    assert set(table.column_names) == {*OWN_COLUMNS, "rewards/digits", "length"} - {"images"}
    assert all(1 <= count <= 4 for count in table["tokens"]) and set(table["step"]) == {1}
    assert all(
        count == 4 for count, cut in zip(table["tokens"], table["truncated"], strict=True) if cut
    )
    assert trainer.state.log_history[0]["longest"] >= max(table["length"])


def test_a_column_of_any_values_is_written(make_trainer):
    values = {
        "mixed": ([1, "two", None, 3.5], ["1", "two", None, "3.5"]),
        "surrogate": (["\ud83d", "b", "c", "d"], ["\\ud83d", "b", "c", "d"]),
        "nested": (
            [{"a": numpy.int64(1)}, {"a": 2}, {}, None],
            [{"a": 1}, {"a": 2}, {"a": None}, None],
        ),
        "large": ([2**70, 1, 2, 3], [str(2**70), "1", "2", "3"]),
    }

    def reward(completions, log_extra, **kwargs):
        for name, (given, _) in values.items():
            log_extra(name, given)
        return [0.0] * len(completions)

    settings = {"log_completions": True, "save_strategy": "steps", "logging_steps": 2}
    trainer = make_trainer(reward, max_steps=3, lr_scheduler_type="constant", **settings)
    trainer.train()
    folder = Path(trainer.args.output_dir)
    table = parquet.read_table(folder / "completions" / "completions_00003.parquet").to_pydict()
    for name, (_, written) in values.items():
        assert table[name] == written, name
    trainer.train(resume_from_checkpoint=folder / "checkpoint-3")  # which holds them, too


def test_what_cannot_be_written_does_not_end_the_run(make_trainer, caplog):
    trainer = make_trainer(
        log_completions=True, num_completions_to_print=0, write_report=True, max_steps=3
    )
    folder = Path(trainer.args.output_dir)
    (folder / "completions").write_text("a file")
    (folder / "run.json").mkdir()
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 3
    for name, error in (("completions in", "FileExistsError"), ("report of", "IsADirectoryError")):
        [warning] = [line for line in caplog.messages if line.startswith(name)]
        assert str(folder) in warning and f"the run continues without it: {error}" in warning


def test_the_callback_of_the_guide(make_trainer, monkeypatch):
    logged, uploaded = [], []
    tracker = SimpleNamespace(Table=lambda dataframe: len(dataframe), log=logged.append)
    monkeypatch.setattr(huggingface_hub, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **each: uploaded.append(each))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "trackio", tracker)
        names = run_block(DOCS, "trackio")
    settings = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "max_steps": 3}
    callbacks = [names["ShareCompletions"]("me/logs")]
    trainer = make_trainer(log_completions=True, callbacks=callbacks, **settings)
    trainer.train()
    assert logged == [
        {name: rows, "train/global_step": step}
        for name, rows, step in (
            ("completions", 8, 2), ("eval_completions", 16, 2),
            ("eval_completions", 16, 3), ("completions", 4, 3),
        )
    ]  # fmt: skip
    folder = Path(trainer.args.output_dir) / "completions"
    assert uploaded == [{"repo_id": "me/logs", "repo_type": "dataset", "folder_path": folder}]


def test_columns_that_are_taken(make_trainer):
    def reward(completions, log_extra, **kwargs):
        log_extra("rewards/other", completions)
        return [0.0] * len(completions)

    with pytest.raises(RuntimeError, match="log_extra: expected a new column"):
        make_trainer(reward, max_steps=1).train()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_starts_over_does_not_mix_its_files_with_earlier_ones(make_trainer, overwrite):
    settings = {"log_completions": True, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"overwrite_output_dir": overwrite}
    for steps in (2, 1, 1):
        trainer = make_trainer(engine=CannedEngine(), max_steps=steps, **settings)
        trainer.train()
    folders = Path(trainer.args.output_dir).glob("completions*")
    files = {folder.name: len(list(folder.iterdir())) for folder in folders}
    earlier = {} if overwrite else {"completions-1": 4, "completions-2": 2}
    assert files == {"completions": 2, **earlier}
