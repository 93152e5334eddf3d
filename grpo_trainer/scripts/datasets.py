"""Which dataset a script trains on: one, or a mixture of several."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, concatenate_datasets
from transformers.hf_argparser import HfArg

from grpo_trainer.data import Prompts, load_prompts


@dataclass
class ScriptArguments:
    """The dataset of a script."""

    dataset_name: str | None = HfArg(
        default=None, help="Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub id."
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of a hub dataset.")
    dataset_train_split: str = HfArg(
        default="train", help="Split for training, of a folder or a hub dataset."
    )
    dataset_test_split: str = HfArg(
        default="test", help="Split for evaluation, of a folder or a hub dataset."
    )
    dataset_streaming: bool = HfArg(
        default=False, help="Read the dataset while training, in its own order; needs max_steps."
    )
    ignore_bias_buffers: bool = HfArg(default=False, help="Is there for scripts written for TRL.")


@dataclass
class DatasetConfig:
    """One dataset of a mixture, in the words of ``datasets.load_dataset``.

    Args:
        path: a file, a folder, a hub id or a format such as ``json``.
        name: configuration of a hub dataset.
        data_dir, data_files: what of it is read.
        split: which of its splits.
        columns: the columns that are kept. Default: all.
        fraction: its share of the mixture; all of a mixture have one, or none.
    """

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


# what a file may have in the fields of a dataset
_TYPES: dict[str, Any] = {
    "path": str,
    "name": str | None,
    "split": str,
    "columns": list | None,
    "fraction": int | float | None,
}


@dataclass
class DatasetMixtureConfig:
    """Datasets that are trained on as one, in place of ``dataset_name``.

    Raises:
        ValueError: one is described by unknown names, or the shares cannot be.
    """

    datasets: list[DatasetConfig] = field(
        default_factory=list,
        metadata={"help": "Datasets to train on as one; in a file with path, split, columns, ..."},
    )
    streaming: bool = HfArg(default=False, help="Read `datasets` while training; needs max_steps.")
    test_split_size: float | None = HfArg(
        default=None, help="Rows of `datasets` for evaluation: how many, or which share below 1."
    )

    def __post_init__(self) -> None:
        self.datasets = [_described(item) for item in self.datasets]
        given = [item.fraction for item in self.datasets if item.fraction is not None]
        if not given:
            return
        if len(given) < len(self.datasets) or min(given) < 0 or not any(given):
            shown = [item.fraction for item in self.datasets]
            raise ValueError(
                "datasets: expected a fraction > 0 for all of them or for none, got "
                f"{', '.join(map(str, shown))}"
            )
        if self.streaming:
            raise ValueError("datasets: expected no fraction with streaming, got one")


def _described(item: DatasetConfig | dict[str, Any]) -> DatasetConfig:
    if isinstance(item, DatasetConfig):
        return item
    try:
        described = DatasetConfig(**item)
    except TypeError as error:
        known = ", ".join(DatasetConfig.__dataclass_fields__)
        raise ValueError(
            f"datasets: expected a path, and beside it some of {known}; got {item!r}"
        ) from error
    for name, kind in _TYPES.items():
        value = getattr(described, name)
        if not isinstance(value, kind):
            shown = getattr(kind, "__name__", str(kind))
            raise ValueError(f"datasets: expected {shown} as {name}, got {value!r}")
    return described


def get_dataset(mixture_config: DatasetMixtureConfig, seed: int = 0) -> DatasetDict:
    """Load the datasets, one after the other, as ``train``, and with ``test_split_size`` ``test``.

    ``seed`` draws the rows of ``test``: the same ones on every process and in a resumed run. With
    fractions each gives its first rows, as many as the largest mixture has in which no row
    comes twice.

    Raises:
        ValueError: there is none, or one of them cannot be loaded or has no such columns.
    """
    if not mixture_config.datasets:
        raise ValueError("datasets: expected at least one, got none")
    loaded = [_load(item, mixture_config.streaming) for item in mixture_config.datasets]
    fractions = [item.fraction for item in mixture_config.datasets]
    if fractions[0] is not None:
        loaded = _mixed(loaded, [float(fraction or 0) for fraction in fractions])
    try:
        joined = concatenate_datasets(loaded)
    except ValueError as error:
        raise ValueError(f"datasets: expected columns of the same types: {error}") from error
    size = mixture_config.test_split_size
    if size is None:
        return DatasetDict({"train": joined})
    if isinstance(joined, IterableDataset):
        raise ValueError(f"test_split_size: expected None with streaming, got {size}")
    return joined.train_test_split(test_size=size if size < 1 else int(size), seed=seed)


def _load(item: DatasetConfig, streaming: bool) -> Prompts:
    options = {"data_dir": item.data_dir, "data_files": item.data_files}
    given = {name: value for name, value in options.items() if value is not None}
    dataset = load_prompts(item.path, item.split, item.name, streaming=streaming, **given)
    if item.columns is None:
        return dataset
    missing = [name for name in item.columns if name not in (dataset.column_names or [name])]
    if missing:
        raise ValueError(f"datasets: expected columns of {item.path!r}, got {', '.join(missing)}")
    return dataset.select_columns(item.columns)


def _mixed(datasets: list[Any], fractions: list[float]) -> list[Dataset]:
    shares = [fraction / sum(fractions) for fraction in fractions]
    pairs = list(zip(datasets, shares, strict=True))
    size = min(len(dataset) / share for dataset, share in pairs if share > 0)
    return [dataset.select(range(round(share * size))) for dataset, share in pairs]
