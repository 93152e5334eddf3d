"""Datasets of prompts: loading and checking them, and the order in which rows are drawn.

transformers' training loop counts the items of a loader, and a resumed run skips that many. But a
generation batch draws as many rows as it needs, with dynamic sampling more than are trained on.
So the loop only counts numbers, one per completion in the loss, and the rows come from a separate
stream. Checkpoints store the stream's position.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice, repeat
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset, Features, IterableDataset, load_dataset
from datasets import Image as ImageFeature
from datasets.exceptions import DatasetsError
from datasets.features.features import _visit
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import ProcessorMixin

from grpo_kernels.tools import hub_or_cache
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data.images import IMAGE_COLUMNS, PROMPT_COLUMNS, Media, image_parts
from grpo_trainer.data.prompts import ProcessingClass, Prompt, check_prompt

PromptDataset: TypeAlias = Dataset | IterableDataset  # rows with a `prompt`
Row = dict[str, Any]  # "prompt", and columns for reward functions

_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def load_prompts(
    name: str, split: str = "train", config: str | None = None, streaming: bool = False
) -> PromptDataset:
    """Load a ``.jsonl``, ``.json``, ``.csv`` or ``.parquet`` file, a folder or a hub dataset.

    A file has only the requested split; ``split`` may select a part of it (``"train[:100]"``).

    Raises:
        ValueError: the file, folder, dataset or split does not exist, cannot be read or has no
            rows, or ``config`` is given for a file.
    """
    path = Path(name)
    if path.suffix in _FORMATS:
        if not path.is_file():
            raise ValueError(f"dataset {name!r}: no such file")
        if config is not None:
            raise ValueError(f"dataset {name!r}: expected a file without config, got {config!r}")
        files = {split.partition("[")[0]: str(path)}
        kind = _FORMATS[path.suffix]
        return _load(name, kind, data_files=files, split=split, streaming=streaming)
    if path.suffix and path.is_file():
        known = ", ".join(_FORMATS)
        raise ValueError(f"dataset {name!r}: expected one of {known}, got {path.suffix}")
    if not path.is_dir() and looks_local(name):
        raise ValueError(f"dataset {name!r}: no such folder")
    return _load(name, name, config, split=split, streaming=streaming)


def _load(name: str, *source: str | None, **options: Any) -> PromptDataset:
    try:
        with hub_or_cache(name):
            return load_dataset(*source, **options)
    except StopIteration as error:  # an empty file has no first row
        raise ValueError(f"dataset {name!r}: expected rows, got an empty file") from error
    except RecursionError as error:
        raise ValueError(f"dataset {name!r} cannot be loaded: it is nested too deep") from error
    # not found, no connection, no such split, no rows; the cause of datasets' own error has the
    # details
    except (OSError, ValueError, DatasetsError) as error:
        cause = error.__cause__ if isinstance(error, DatasetsError) else None
        raise ValueError(f"dataset {name!r} cannot be loaded: {cause or error}") from error


def looks_local(name: str) -> bool:
    """Return whether ``name`` cannot be a hub id (``name`` or ``owner/name``)."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_datasets(
    train: PromptDataset | None,
    evaluation: PromptDataset | dict[str, PromptDataset] | None,
    args: GRPOConfig,
    environments: bool = False,
) -> None:
    """Raise ValueError unless they are datasets of prompts, with enough rows for training.

    With ``environments``, which can provide the prompts, rows need no ``prompt``.
    """
    needed = args.dynamic_prompts_fn is not None or args.remove_unused_columns
    for name, dataset in _named(train, evaluation):
        if not isinstance(dataset, PromptDataset):
            raise ValueError(
                f"{name}: expected a datasets.Dataset or IterableDataset, got "
                f"{type(dataset).__name__}"
            )
        columns = _columns(dataset)
        if "prompt" not in columns and (needed or not environments):
            raise ValueError(
                f"{name}: expected a `prompt` column, got columns {', '.join(columns)}; rename the "
                "one that has the prompts, in the file or by dataset.rename_column(NAME, 'prompt')"
            )
        for row in islice(dataset, 1):  # the others are checked when they are drawn
            check_prompt(row, name)
    if isinstance(train, IterableDataset):
        if args.max_steps < 1:
            raise ValueError(
                "max_steps: expected the number of steps, since a streaming train_dataset has "
                f"no length, got {args.max_steps}"
            )
    elif train is not None and len(train) < args.prompts_per_generation:
        raise ValueError(
            f"train_dataset: expected at least {args.prompts_per_generation} prompts, one "
            f"generation batch, got {len(train)}"
        )


def check_images(
    train: PromptDataset | None,
    evaluation: PromptDataset | dict[str, PromptDataset] | None,
    processing_class: ProcessingClass,
) -> None:
    """Raise ValueError if datasets have images and there is no processor for them."""
    if isinstance(processing_class, ProcessorMixin):
        return
    for name, dataset in _named(train, evaluation):
        for row in islice(dataset, 1):
            if row.keys() & set(IMAGE_COLUMNS) or any(image_parts(row.get("prompt"))):
                raise ValueError(
                    f"{name}: expected no images without a processor as processing_class, got a "
                    f"row {shortened(row)} and a {type(processing_class).__name__}"
                )


def _named(
    train: PromptDataset | None, evaluation: PromptDataset | dict[str, PromptDataset] | None
) -> list[tuple[str, PromptDataset]]:
    others = evaluation if isinstance(evaluation, dict) else {"eval_dataset": evaluation}
    datasets = {"train_dataset": train} | others
    return [(name, dataset) for name, dataset in datasets.items() if dataset is not None]


def _columns(dataset: PromptDataset) -> list[str]:
    # a stream may not know its columns before a row is read
    return dataset.column_names or list(next(iter(dataset), {"prompt": None}))


def prompt_columns(dataset: PromptDataset) -> list[str]:
    """Return the columns that the model sees, which ``remove_unused_columns`` keeps."""
    return [name for name in _columns(dataset) if name in PROMPT_COLUMNS]


class DatasetRow(dict[str, Any]):
    """A row of a dataset.

    Args:
        number: its position in the dataset; None: unknown.
        original: the dataset's prompt, if this row has another one.
    """

    opened: Row | None = None  # a copy with open images, once they are opened

    def __init__(self, row: Row, number: int | None = None, original: Prompt | None = None) -> None:
        super().__init__(row)
        self.number = number
        self.original = original

    def __reduce__(self) -> tuple[Any, ...]:
        return DatasetRow, (dict(self), self.number, self.original)


@dataclass(eq=False)
class Numbered(TorchDataset[DatasetRow]):
    """The rows of a dataset, numbered."""

    dataset: Dataset

    def __getitems__(self, indices: list[int]) -> list[Row]:
        once = {index: DatasetRow(self.dataset[index], index) for index in {*indices}}
        return [once[index] for index in indices]  # a group has one row

    def __len__(self) -> int:
        return len(self.dataset)


def unopened(dataset: Any, args: GRPOConfig) -> Any:
    """Return a dataset, or a dictionary of datasets, that does not decode the images of prompts, so
    that the code that opens them can limit where they come from.

    If not all sources are allowed, ``datasets`` does not decode images of other columns either.
    """
    if isinstance(dataset, dict):
        return {name: unopened(one, args) for name, one in dataset.items()}
    if not isinstance(dataset, Dataset | IterableDataset) or dataset.features is None:
        return dataset
    columns = PROMPT_COLUMNS if Media.of(args) == Media() else dataset.features
    features = Features(
        {
            name: _visit(feature, _stored) if name in columns else feature
            for name, feature in dataset.features.items()
        }
    )
    if features == dataset.features:
        return dataset
    # a stream from the hub may open them ahead, in threads
    streams = isinstance(dataset, IterableDataset)
    dataset = dataset.decode(False) if streams else copy.copy(dataset)
    # a cast would rewrite the whole dataset
    dataset._info = dataset.info.copy()
    dataset._info.features = features
    return dataset


def _stored(feature: Any) -> Any:
    return replace(feature, decode=False) if isinstance(feature, ImageFeature) else feature


class PromptStream:
    """The training prompts, pass after pass, in one order on every process and after a resume.

    A dataset is shuffled by ``seed`` and the number of the pass. A pass has only whole generation
    batches; the rows left over appear in other passes. A streaming dataset is shuffled by its
    ``shuffle``, in a buffer of 1,000 rows, with a new epoch for every pass.

    Args:
        dataset: rows with a ``prompt``.
        prompts_per_batch: distinct prompts per generation batch.
        seed: for shuffling; None: dataset order.
    """

    def __init__(
        self, dataset: PromptDataset, prompts_per_batch: int = 1, seed: int | None = None
    ) -> None:
        self._dataset = dataset
        self._per_batch = prompts_per_batch
        self._seed = seed
        self._shuffled = seed is not None  # for streaming datasets
        self._go_to(0, 0)

    def take(self, count: int) -> list[Row]:
        """Return the next ``count`` rows.

        Raises:
            ValueError: the dataset is empty.
        """
        taken: list[Row] = []
        while True:
            part = [*islice(self._rows, count - len(taken))]
            self._offset += len(part)
            taken += part
            if len(taken) == count:
                return taken
            if self._offset == 0:
                raise ValueError("train_dataset: expected prompts, got an empty dataset")
            self._go_to(self._epoch + 1, 0)

    def state(self) -> dict[str, int]:
        """Return the position of the stream."""
        return {"epoch": self._epoch, "offset": self._offset, "shuffled": self._shuffled}

    def restore(self, state: dict[str, int]) -> None:
        """Go to the saved position. A streaming dataset is read again up to it."""
        self._shuffled = bool(state.get("shuffled", False))  # version 1.0 did not shuffle streams
        self._go_to(state["epoch"], state["offset"])

    def _go_to(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._rows: Iterator[Row] = self._pass(epoch, offset)

    def _pass(self, epoch: int, offset: int) -> Iterator[Row]:
        """Return the rows of a pass, starting at ``offset``."""
        dataset = self._dataset
        if isinstance(dataset, IterableDataset):
            numbers: Iterator[int | None] = count(offset)
            if self._shuffled:
                dataset, numbers = dataset.shuffle(seed=self._seed), repeat(None)
            dataset.set_epoch(epoch)
            return map(DatasetRow, islice(iter(dataset), offset, None), numbers)
        size = len(dataset)
        order = list(range(size))
        if self._seed is not None:
            # consecutive seeds are fine: the generator mixes its seed
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(size, generator=generator).tolist()
        numbers_left = order[offset : size - size % self._per_batch]
        return (DatasetRow(dataset[number], number) for number in numbers_left)


@dataclass(eq=False)
class RepeatedStream(TorchIterableDataset):
    """The rows of a streaming dataset, numbered, each ``group_size`` times in a row."""

    rows: IterableDataset
    group_size: int

    def __iter__(self) -> Iterator[Row]:
        return repeated(map(DatasetRow, self.rows, count()), self.group_size)


def repeated(items: Iterable[Any], times: int) -> Iterator[Any]:
    """Yield each item ``times`` times in a row."""
    return (item for item in items for _ in range(times))


def own_copy(value: Any) -> Any:
    """Return ``value`` with its lists and dictionaries copied, but not their other contents."""
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [own_copy(item) for item in value]
    return value


def check_plain(name: str, value: Any) -> None:
    """Raise ValueError unless a checkpoint can hold ``value``."""
    if not _is_plain(value):
        raise ValueError(
            f"{name}: expected numbers, text, lists and dictionaries, which a checkpoint can hold, "
            f"got {type(value).__name__}"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return _is_plain([*value.keys(), *value.values()])
    return type(value) in (type(None), bool, int, float, str, torch.Tensor)
