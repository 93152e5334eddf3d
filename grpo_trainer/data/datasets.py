"""Datasets of prompts from files, folders and the hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from transformers import ProcessorMixin

from grpo_kernels.tools import hub_or_cache
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data.images import (
    IMAGE_COLUMNS,
    PROMPT_COLUMNS,
    image_parts,
    image_source,
    parts_of,
)
from grpo_trainer.data.prompts import ProcessingClass

Prompts: TypeAlias = Dataset | IterableDataset  # rows with a `prompt`

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(
    name: str, split: str = "train", config: str | None = None, **options: Any
) -> Prompts:
    """Load a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder or a hub dataset.

    A file is the split that is asked for, of which ``split`` may take a part (``"train[:100]"``).
    ``options`` are more arguments of ``datasets.load_dataset``, such as ``streaming``.

    Raises:
        ValueError: there is no such file, folder or dataset, or no such split, it cannot be read
            or has no rows, or a file has a ``config`` or other files beside it.
    """
    path = Path(name)
    if path.suffix in _FORMATS:
        if not path.is_file():
            raise ValueError(f"dataset {name!r}: no such file")
        asked = {"config": config} | {key: options.get(key) for key in ("data_dir", "data_files")}
        beside = [f"{key} {value!r}" for key, value in asked.items() if value is not None]
        if beside:
            raise ValueError(f"dataset {name!r}: expected a file alone, got {', '.join(beside)}")
        source = {"data_files": {split.partition("[")[0]: str(path)}, "split": split}
        return _load(name, _FORMATS[path.suffix], **options | source)
    if path.suffix and path.is_file():
        known = ", ".join(_FORMATS)
        raise ValueError(f"dataset {name!r}: expected one of {known}, got {path.suffix}")
    if not path.is_dir() and looks_local(name):
        raise ValueError(f"dataset {name!r}: no such folder")
    return _load(name, name, config, split=split, **options)


def _load(name: str, *source: str | None, **options: Any) -> Prompts:
    try:
        with hub_or_cache(name):
            return load_dataset(*source, **options)
    except StopIteration as error:  # in a file without a byte it looks for the first row
        raise ValueError(f"dataset {name!r}: expected rows, got an empty file") from error
    except DatasetsError as error:  # says that something went wrong; its cause says what
        raise ValueError(
            f"dataset {name!r} cannot be loaded: {error.__cause__ or error}"
        ) from error
    except RecursionError as error:
        raise ValueError(f"dataset {name!r} cannot be loaded: it is nested too deep") from error
    except (OSError, ValueError) as error:  # not found, no connection, no such split, no rows
        raise ValueError(f"dataset {name!r} cannot be loaded: {error}") from error


def looks_local(name: str) -> bool:
    """Return whether ``name`` cannot be a hub id, which is ``name`` or ``owner/name``."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_datasets(
    train: Prompts | None,
    evaluation: Prompts | dict[str, Prompts] | None,
    args: GRPOConfig,
    environments: bool = False,
) -> None:
    """Raise ValueError unless they are datasets of prompts, enough of them for training.

    With ``environments``, which can make the prompts, rows need none.
    """
    needed = args.dynamic_prompts_fn is not None or args.remove_unused_columns
    may_lack_prompts = environments and not needed
    for name, dataset in _named(train, evaluation).items():
        if dataset is not None:
            _check_prompts(name, dataset, may_lack_prompts)
    if isinstance(train, IterableDataset):
        if args.max_steps < 1:
            raise ValueError(
                "max_steps: expected how many steps to take, since a streaming train_dataset has "
                f"no length, got {args.max_steps}"
            )
    elif train is not None and len(train) < args.prompts_per_generation:
        raise ValueError(
            f"train_dataset: expected at least {args.prompts_per_generation} prompts, one "
            f"generation batch, got {len(train)}"
        )


def prompt_columns(dataset: Prompts) -> list[str]:
    """Return the columns that the model sees something of: ``remove_unused_columns`` keeps them."""
    return [name for name in _columns(dataset) if name in PROMPT_COLUMNS]


def as_they_are(rows: list[Any]) -> list[Any]:
    """Return the items of a batch as they are."""
    return rows


def check_parts(name: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if a prompt of ``rows`` has parts that are neither text nor images.

    The chat template would write a placeholder for one, and the model would not see it.
    """
    for part in (part for row in rows for part in parts_of(row.get("prompt"))):
        if not isinstance(part, Mapping):
            raise ValueError(
                f"{name}: expected parts of messages as {{'type': ...}}, got {shortened(part)}"
            )
        shown = part.get("type")
        if shown not in (None, "text", "image") or (
            shown is None and image_source(part) is not None
        ):
            raise ValueError(
                f"{name}: expected prompts of text and images, got a message with a part of type "
                f"{shown!r}"
            )


def check_images(
    train: Prompts | None,
    evaluation: Prompts | dict[str, Prompts] | None,
    processing_class: ProcessingClass,
) -> None:
    """Raise ValueError if datasets have images and there is no processor for them."""
    if isinstance(processing_class, ProcessorMixin):
        return
    for name, dataset in _named(train, evaluation).items():
        for row in islice(dataset or (), 1):
            if row.keys() & set(IMAGE_COLUMNS) or any(image_parts(row.get("prompt"))):
                raise ValueError(
                    f"{name}: expected no images without a processor as processing_class, got a "
                    f"row {shortened(row)} and a {type(processing_class).__name__}"
                )


def _named(
    train: Prompts | None, evaluation: Prompts | dict[str, Prompts] | None
) -> dict[str, Prompts | None]:
    others = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    return {"train_dataset": train, **others}


def _columns(dataset: Prompts) -> list[str]:
    # a stream may not know its columns until a row is read
    return dataset.column_names or list(next(iter(dataset), {"prompt": None}))


def _check_prompts(name: str, dataset: Prompts, may_lack_prompts: bool) -> None:
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(
            f"{name}: expected a datasets.Dataset or IterableDataset, got {type(dataset).__name__}"
        )
    columns = _columns(dataset)
    if "prompt" not in columns and not may_lack_prompts:
        raise ValueError(
            f"{name}: expected a `prompt` column, got columns {', '.join(columns)}; rename the one "
            "that has the prompts, in the file or by dataset.rename_column(NAME, 'prompt')"
        )
    check_parts(name, islice(dataset, 1))
