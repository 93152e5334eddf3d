"""Datasets of a script: one, or several that are trained on as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict, IterableDataset

from grpo_trainer import DatasetMixtureConfig, TrlParser, get_dataset
from grpo_trainer.scripts import DatasetConfig


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, count in (("a", 8), ("b", 4)):
        rows = [{"prompt": f"{name}{i}", "answer": str(i), f"only_{name}": 1} for i in range(count)]
        Dataset.from_list(rows).to_json(f"{name}.jsonl")


def mixture(**changes) -> DatasetMixtureConfig:
    columns = ["prompt", "answer"]
    items = [{"path": f"{name}.jsonl", "columns": columns} for name in "ab"]
    return DatasetMixtureConfig(datasets=items, **changes)


def test_one_after_the_other():
    loaded = get_dataset(mixture())
    assert isinstance(loaded, DatasetDict) and list(loaded) == ["train"]
    assert loaded["train"].column_names == ["prompt", "answer"]
    names = [row["prompt"] for row in loaded["train"]]
    assert names == [*(f"a{i}" for i in range(8)), *(f"b{i}" for i in range(4))]


def test_a_split_for_evaluation():
    for size, rows in ((3, 3), (0.25, 3)):
        loaded, again, other = (get_dataset(mixture(test_split_size=size), n) for n in (7, 7, 8))
        drawn = list(loaded["test"]["prompt"])  # the same in a resumed run
        assert drawn == list(again["test"]["prompt"]) != list(other["test"]["prompt"])
        assert (len(loaded["train"]), len(loaded["test"])) == (12 - rows, rows)


def test_fractions():
    config = mixture()
    for item, fraction in zip(config.datasets, (1, 1), strict=True):
        item.fraction = fraction
    names = [row["prompt"] for row in get_dataset(config)["train"]]
    assert names == [*(f"a{i}" for i in range(4)), *(f"b{i}" for i in range(4))]
    config.datasets[1].fraction = 0
    assert len(get_dataset(config)["train"]) == 8


def test_streaming():
    loaded = get_dataset(mixture(streaming=True))["train"]
    assert isinstance(loaded, IterableDataset) and len(list(loaded)) == 12


def test_formats_and_options():
    item = DatasetConfig(path="json", data_files=["a.jsonl"], split="train[:2]")
    assert len(get_dataset(DatasetMixtureConfig(datasets=[item]))["train"]) == 2
    item = DatasetConfig(path="a.jsonl", split="test[2:3]")  # a file is any split
    assert len(get_dataset(DatasetMixtureConfig(datasets=[item]))["train"]) == 1


def test_in_a_file_and_on_the_command_line():
    Path("run.yaml").write_text(
        "datasets:\n  - path: a.jsonl\n    columns: [prompt]\n  - {path: b.jsonl, split: train}\n"
        "test_split_size: 0.5\n"
    )
    [config] = TrlParser(DatasetMixtureConfig).parse_args_and_config(["--config", "run.yaml"])
    assert config.datasets == [
        DatasetConfig(path="a.jsonl", columns=["prompt"]),
        DatasetConfig(path="b.jsonl"),
    ]
    assert config.test_split_size == 0.5
    words = ["--datasets", "a.jsonl", "b.jsonl", "--streaming"]
    [config] = TrlParser(DatasetMixtureConfig).parse_args_and_config(words)
    assert [item.path for item in config.datasets] == ["a.jsonl", "b.jsonl"] and config.streaming


def test_what_cannot_be_mixed():
    path = {"path": "a.jsonl"}
    for items, message in (
        ([], "datasets: expected at least one, got none"),
        ([{"name": "x"}], "datasets: expected a path, and beside it some of path, name, .* got"),
        ([path | {"colums": ["a"]}], "datasets: expected a path, and beside it .*colums"),
        ([path | {"columns": ["a", "prompt"]}], "expected columns of 'a.jsonl', got a"),
        ([path | {"fraction": 1}, path], "a fraction > 0 for all of them or for none, got 1, None"),
        ([path | {"fraction": -1}], "datasets: expected a fraction > 0"),
        ([{"path": "missing.jsonl"}], "dataset 'missing.jsonl': no such file"),
        (
            [{"path": "a.jsonl", "name": "x", "data_files": "b.jsonl"}],
            "dataset 'a.jsonl': expected a file alone, got config 'x', data_files 'b.jsonl'",
        ),
        ([{"path": None}], "datasets: expected str as path, got None"),
        ([path | {"split": None}], "datasets: expected str as split, got None"),
        ([path | {"columns": "prompt"}], "datasets: expected .*list.* as columns, got 'prompt'"),
        ([path | {"fraction": "0.5"}], "datasets: expected .* as fraction, got '0.5'"),
        ([path, {"path": "other.jsonl"}], "datasets: expected columns of the same types"),
    ):
        Dataset.from_list([{"prompt": 1}]).to_json("other.jsonl")
        with pytest.raises(ValueError, match=message):
            get_dataset(DatasetMixtureConfig(datasets=items))
    with pytest.raises(ValueError, match="datasets: expected no fraction with streaming"):
        DatasetMixtureConfig(datasets=[path | {"fraction": 1}], streaming=True)
    with pytest.raises(ValueError, match="test_split_size: expected None with streaming, got 2"):
        get_dataset(DatasetMixtureConfig(datasets=[path], streaming=True, test_split_size=2))
