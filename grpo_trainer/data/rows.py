"""Rows of a dataset: numbered, in which order they are drawn, and how often."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset
from datasets import Image as ImageFeature
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset as TorchIterableDataset
from torch.utils.data import Sampler

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data.datasets import Prompts
from grpo_trainer.data.images import PROMPT_COLUMNS, Media


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


Row = dict[str, Any]  # of a dataset: "prompt" and what reward functions read


class PromptStream:
    """The training prompts, pass after pass, in one order on every process and after a resume.

    A dataset is shuffled by ``seed`` and the number of the pass, and its passes are cut to whole
    generation batches; the rest has its turn in another order. A streaming dataset comes in the
    order of its own: shuffle it with its ``shuffle``, which gets a new epoch with every pass.

    Args:
        dataset: rows with a ``prompt``.
        prompts_per_batch: different prompts of a generation batch.
        seed: of the shuffling; None: dataset order.
    """

    def __init__(
        self,
        dataset: Prompts,
        prompts_per_batch: int = 1,
        seed: int | None = None,
    ) -> None:
        self._dataset = dataset
        self._per_batch = prompts_per_batch
        self._seed = seed
        self.restore({"epoch": 0, "offset": 0})

    def take(self, count: int) -> list[Row]:
        """Return the next ``count`` rows.

        Raises:
            ValueError: the dataset is empty.
        """
        taken: list[Row] = []
        while True:
            part = list(islice(self._rows, count - len(taken)))
            self._offset += len(part)
            taken += part
            if len(taken) == count:
                return taken
            if self._offset == 0:
                raise ValueError("train_dataset: expected prompts, got an empty dataset")
            self.restore({"epoch": self._epoch + 1, "offset": 0})

    def state(self) -> dict[str, int]:
        """Return where the stream stands."""
        return {"epoch": self._epoch, "offset": self._offset}

    def restore(self, state: dict[str, int]) -> None:
        """Go to where a stream of the same dataset stood. A streaming dataset is read again."""
        self._epoch, self._offset = state["epoch"], state["offset"]
        self._rows = self._pass()

    def _pass(self) -> Iterator[Row]:
        dataset = self._dataset
        if isinstance(dataset, IterableDataset):
            dataset.set_epoch(self._epoch)
            rows = islice(iter(dataset), self._offset, None)
            return map(NumberedRow, rows, count(self._offset))
        whole, numbered = len(dataset) - len(dataset) % self._per_batch, Numbered(dataset)
        return (numbered[index] for index in self._order()[self._offset : whole])

    def _order(self) -> list[int]:
        size = len(self._dataset)
        if self._seed is None:
            return list(range(size))
        generator = torch.Generator()
        # consecutive seeds are fine: the generator mixes its seed
        generator.manual_seed(self._seed + self._epoch)
        return torch.randperm(size, generator=generator).tolist()


def completions_per_epoch(dataset: Prompts, args: GRPOConfig) -> int:
    """Count the completions in the loss of one pass over ``dataset``; of a stream: of all steps."""
    if isinstance(dataset, IterableDataset):
        micro_steps = args.max_steps * args.gradient_accumulation_steps
    else:
        batches = len(dataset) // args.prompts_per_generation
        micro_steps = batches * args.micro_steps_per_generation
    return micro_steps * args.per_device_train_batch_size * args.world_size


def optimizer_steps(dataset: Prompts, args: GRPOConfig) -> int:
    """Return steps of a whole run, as transformers counts them."""
    if args.max_steps > 0:
        return args.max_steps
    micro_steps = len(dataset) // args.prompts_per_generation * args.micro_steps_per_generation
    return math.ceil(
        args.num_train_epochs * math.ceil(micro_steps / args.gradient_accumulation_steps)
    )


class RepeatSampler(Sampler[int]):
    """Each of ``size`` indices ``group_size`` times in a row: ``0 0 0 1 1 1 2 ...``."""

    def __init__(self, size: int, group_size: int) -> None:
        self.size = size
        self.group_size = group_size

    def __iter__(self) -> Iterator[int]:
        return repeated(range(self.size), self.group_size)

    def __len__(self) -> int:
        return self.size * self.group_size


class RepeatedStream(TorchIterableDataset):
    """The same for the rows of a streaming dataset."""

    def __init__(self, rows: IterableDataset, group_size: int) -> None:
        self.rows = rows
        self.group_size = group_size

    def __iter__(self) -> Iterator[Row]:
        return repeated(map(NumberedRow, self.rows, count()), self.group_size)


def own_copy(value: Any) -> Any:
    """Return ``value`` with lists and dictionaries of its own. What they hold is shared."""
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [own_copy(item) for item in value]
    return value


def repeated(items: Iterable[Any], times: int) -> Iterator[Any]:
    """Yield each item ``times`` times in a row."""
    return (item for item in items for _ in range(times))
