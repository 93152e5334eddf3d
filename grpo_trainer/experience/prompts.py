"""A dataset's prompts, as :class:`Prompts`: draws rows and opens their images; each row is
completed ``num_generations`` times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import (
    DatasetRow,
    ImageError,
    Media,
    PromptDataset,
    Prompts,
    PromptStream,
    Row,
    Sample,
    check_prompt,
    open_images,
    own_copy,
    prompt_columns,
    repeated,
)

logger = logging.getLogger(__name__)

_ROUNDS = 10  # rows that are tried, one by one, for the same place


class DatasetPrompts(Prompts):
    """The training prompts in the order of a stream.

    With ``on_bad_image="skip"``, rows with unreadable images are replaced by the next rows. Each
    process checks its own rows and tells the others.

    Args:
        dataset: rows with a ``prompt``.
        args: give the order and the group size.
        accelerator: connects the processes.
    """

    def __init__(self, dataset: PromptDataset, args: GRPOConfig, accelerator: Accelerator) -> None:
        if args.remove_unused_columns:
            dataset = dataset.select_columns(prompt_columns(dataset))
        seed = args.seed if args.shuffle_dataset else None
        self._stream = PromptStream(dataset, args.prompts_per_generation, seed)
        self._args = args
        self._accelerator = accelerator
        self._media = Media.of(args)

    def next(self, count: int) -> list[Sample]:
        """Return this process's samples for the next ``count`` prompts.

        Raises:
            ValueError: a prompt is neither text nor messages of text and images, or an image cannot
                be read, also not in ten rows for the same place.
        """
        rows, size = self.rows(count), self._args.num_generations
        own = share(count * size, self._accelerator)
        if self._args.on_bad_image == "skip":
            places = range(own.start // size, -(-own.stop // size))
            for _ in range(_ROUNDS):
                bad = self._unreadable(rows, places)
                if not bad:
                    break
                for index, row in zip(bad, self.rows(len(bad)), strict=True):
                    rows[index] = row
            else:
                raise ValueError(
                    f"images: expected readable images in one of {_ROUNDS} rows, got none; the log "
                    "has the error of each row"
                )
        return samples_of(list(repeated(rows, size))[own], self._media)

    def rows(self, count: int) -> list[Row]:
        """Return the next ``count`` rows; ValueError for an empty dataset."""
        return self._stream.take(count)

    def state(self) -> Any:
        return self._stream.state()

    def restore(self, state: Any) -> None:
        self._stream.restore(state)

    def _unreadable(self, rows: list[Row], places: range) -> list[int]:
        """Return which rows have unreadable images; each process checks its ``places``."""
        bad = torch.zeros(len(rows), device=self._accelerator.device)
        for index in places:
            try:
                _opened(rows[index], self._media)
            except ImageError as error:
                bad[index] = 1
                logger.warning("skipping a row: %s", error)
        return self._accelerator.reduce(bad).nonzero()[:, 0].tolist()


def samples_of(rows: Sequence[Row], media: Media) -> list[Sample]:
    """Return a sample for each of ``rows``, with its images opened and in its prompt.

    Raises:
        ValueError: a prompt is neither text nor messages of text and images, or an image cannot
            be read.
    """
    distinct = {id(row): row for row in rows}  # a group shares one row
    opened = {key: _opened(row, media) for key, row in distinct.items()}
    copies = [own_copy(opened[id(row)]) for row in rows]
    return [
        Sample(copy.get("prompt"), row=row, inputs=copy)
        for row, copy in zip(rows, copies, strict=True)
    ]


def _opened(row: Row, media: Media) -> Row:
    if isinstance(row, DatasetRow) and row.opened is not None:
        return row.opened  # a URL may not answer a second time
    check_prompt(row)
    opened = open_images(row, media)
    if isinstance(row, DatasetRow):
        row.opened = opened
    return opened


def share(count: int, accelerator: Accelerator) -> slice:
    """Return which of ``count`` consecutive items belong to this process."""
    process, processes = accelerator.process_index, accelerator.num_processes
    return slice(process * count // processes, (process + 1) * count // processes)
