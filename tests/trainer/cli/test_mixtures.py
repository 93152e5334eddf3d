"""Datasets of a script: one, or several that are trained on as one."""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset

from grpo_trainer import DatasetMixtureConfig, get_dataset


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for name, count in (("a", 8), ("b", 4)):
        rows = [{"prompt": f"{name}{i}", "answer": str(i), f"only_{name}": 1} for i in range(count)]
        Dataset.from_list(rows).to_json(f"{name}.jsonl")


def mixture(fractions=(None, None), **changes) -> DatasetMixtureConfig:
    items = [
        {"path": f"{name}.jsonl", "columns": ["prompt", "answer"], "fraction": fraction}
        for name, fraction in zip("ab", fractions, strict=True)
    ]
    return DatasetMixtureConfig(datasets=items, **changes)


def test_fractions():
    for fractions, taken in (((None, None), (8, 4)), ((1, 1), (4, 4)), ((1, 0), (8, 0))):
        loaded = get_dataset(mixture(fractions))["train"]
        assert loaded.column_names == ["prompt", "answer"]
        names = [
            f"{name}{i}" for name, count in zip("ab", taken, strict=True) for i in range(count)
        ]
        assert list(loaded["prompt"]) == names


def test_a_split_for_evaluation():
    for size, rows in ((3, 3), (0.25, 3)):
        loaded, again, other = (get_dataset(mixture(test_split_size=size), n) for n in (7, 7, 8))
        drawn = list(loaded["test"]["prompt"])  # the same in a resumed run
        assert drawn == list(again["test"]["prompt"]) != list(other["test"]["prompt"])
        assert (len(loaded["train"]), len(loaded["test"])) == (12 - rows, rows)


def test_formats_and_options():
    streamed = get_dataset(mixture(streaming=True))["train"]
    assert isinstance(streamed, IterableDataset) and len(list(streamed)) == 12
    item = {"path": "json", "data_files": ["a.jsonl"], "split": "train[:2]"}
    assert len(get_dataset(DatasetMixtureConfig(datasets=[item]))["train"]) == 2


PATH = {"path": "a.jsonl"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "datasets: expected at least one, got none"),
        ([PATH | {"colums": ["a"]}], "datasets: expected a path, and beside it .*colums"),
        ([PATH | {"columns": ["a", "prompt"]}], "expected columns of 'a.jsonl', got a"),
        ([PATH | {"fraction": 1}, PATH], "a fraction > 0 for all of them or for none, got 1, None"),
        ([PATH | {"columns": "prompt"}], "datasets: expected .*list.* as columns, got 'prompt'"),
        ([PATH | {"fraction": -1}], "datasets: expected a fraction > 0"),
        ([PATH | {"name": "x"}], "dataset 'a.jsonl': expected a file alone, got config 'x'"),
        ([PATH, {"path": "other.jsonl"}], "datasets: expected columns of the same types"),
    ],
)
def test_what_cannot_be_mixed(items, message):
    Dataset.from_list([{"prompt": 1}]).to_json("other.jsonl")
    with pytest.raises(ValueError, match=message):
        get_dataset(DatasetMixtureConfig(datasets=items))


def test_what_cannot_be_streamed():
    with pytest.raises(ValueError, match="datasets: expected no fraction with streaming"):
        DatasetMixtureConfig(datasets=[PATH | {"fraction": 1}], streaming=True)
    with pytest.raises(ValueError, match="test_split_size: expected None with streaming, got 2"):
        get_dataset(DatasetMixtureConfig(datasets=[PATH], streaming=True, test_split_size=2))
