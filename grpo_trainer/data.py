"""Datasets of prompts from files, folders and the hub."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset, load_dataset

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(name: str, split: str = "train", config: str | None = None) -> Dataset:
    """Rows of a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder or a hub dataset.

    A file has no splits: ``split`` and ``config`` apply to folders and to the hub.

    Raises:
        ValueError: there is no such file, folder or dataset, or no such split.
    """
    path = Path(name)
    if path.suffix in _FORMATS:
        if not path.is_file():
            raise ValueError(f"dataset {name!r}: no such file")
        return load_dataset(_FORMATS[path.suffix], data_files=str(path), split="train")
    if path.suffix and path.is_file():
        known = ", ".join(_FORMATS)
        raise ValueError(f"dataset {name!r}: expected one of {known}, got {path.suffix}")
    if not path.is_dir() and looks_local(name):
        raise ValueError(f"dataset {name!r}: no such folder")
    try:
        return load_dataset(name, config, split=split)
    except (OSError, ValueError) as error:  # not found, no connection, no such split
        raise ValueError(f"dataset {name!r} cannot be loaded: {error}") from error


def looks_local(name: str) -> bool:
    """Whether ``name`` cannot be a hub id, which is ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_datasets(
    train: Dataset | None,
    evaluation: Dataset | dict[str, Dataset] | None,
    prompts_per_generation: int,
) -> None:
    """Raises ValueError unless they are datasets of prompts, enough of them for training."""
    named = {"train_dataset": train}
    named |= evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    for name, dataset in named.items():
        if dataset is None:
            continue
        if not isinstance(dataset, Dataset):
            raise ValueError(f"{name}: expected a datasets.Dataset, got {type(dataset).__name__}")
        if "prompt" not in dataset.column_names:
            columns = ", ".join(dataset.column_names)
            raise ValueError(f"{name}: expected a `prompt` column, got columns {columns}")
    if train is not None and len(train) < prompts_per_generation:
        raise ValueError(
            f"train_dataset: expected at least {prompts_per_generation} prompts, one generation "
            f"batch, got {len(train)}"
        )
