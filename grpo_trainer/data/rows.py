"""Rows that know their number in the dataset, with images that nobody has opened yet."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from datasets import Dataset, Features, IterableDataset
from datasets import Image as ImageFeature
from torch.utils.data import Dataset as TorchDataset

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data.images import PROMPT_COLUMNS
from grpo_trainer.data.media import Media


class NumberedRow(dict[str, Any]):
    """A row of a dataset, and itself with its images open, once they are."""

    opened: dict[str, Any] | None = None

    def __init__(self, row: dict[str, Any], number: int) -> None:
        super().__init__(row)
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return NumberedRow, (dict(self), self.number)


class Numbered(TorchDataset[NumberedRow]):
    """The rows of a dataset, numbered."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> NumberedRow:
        return NumberedRow(self.dataset[index], index)

    def __len__(self) -> int:
        return len(self.dataset)


def unopened(dataset: Any, args: GRPOConfig) -> Any:
    """Return a dataset, or a dictionary of datasets, that leaves the images of prompts as they are
    stored, so that who opens them can say where they may come from.

    Where not all are allowed, ``datasets`` opens those of other columns neither.
    """
    if isinstance(dataset, dict):
        return {name: unopened(one, args) for name, one in dataset.items()}
    if not isinstance(dataset, Dataset | IterableDataset) or dataset.features is None:
        return dataset
    features = copy.deepcopy(dict(dataset.features))
    columns = PROMPT_COLUMNS if Media.of(args) == Media() else features
    seen = {name: feature for name, feature in features.items() if name in columns}
    images = [image for image in _images(seen) if image.decode]
    if not images:
        return dataset
    for image in images:
        image.decode = False
    # a stream of the hub's may open them ahead, in threads
    streams = isinstance(dataset, IterableDataset)
    dataset = dataset.decode(False) if streams else copy.copy(dataset)
    # a cast would write all of the dataset anew
    dataset._info = dataset.info.copy()
    dataset._info.features = Features(features)
    return dataset


def _images(feature: Any) -> Iterator[ImageFeature]:
    if isinstance(feature, ImageFeature):
        yield feature
    elif isinstance(feature, dict):
        for each in feature.values():
            yield from _images(each)
    elif isinstance(feature, list):
        yield from _images(feature[0])
    elif hasattr(feature, "feature"):  # of a list
        yield from _images(feature.feature)
