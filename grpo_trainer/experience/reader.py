"""Rows with their images open, and other rows in place of those whose images cannot be read."""

from __future__ import annotations

import logging

import torch
from accelerate import Accelerator

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import (
    ImageError,
    Media,
    NumberedRow,
    PromptStream,
    Row,
    check_parts,
    check_prompts,
    open_images,
    own_copy,
)
from grpo_trainer.experience.curriculum import Curriculum

logger = logging.getLogger(__name__)

_ROUNDS = 10  # of rows that are tried, one after the other, in the same place


def share(count: int, accelerator: Accelerator) -> slice:
    """Return the rows of ``count`` that belong to this process."""
    process, processes = accelerator.process_index, accelerator.num_processes
    return slice(process * count // processes, (process + 1) * count // processes)


class RowReader:
    """Opens images where ``args`` allows it."""

    def __init__(self, args: GRPOConfig, accelerator: Accelerator) -> None:
        self._args = args
        self._accelerator = accelerator
        self._media = Media.of(args)

    def read(self, rows: list[Row]) -> list[Row]:
        """Return copies of ``rows``, which functions may edit, the images of each in its prompt.

        Raises:
            ValueError: a prompt has other parts than text and images, or an image cannot be read.
        """
        check_parts("prompt", rows)
        once = {id(row): row for row in rows}  # a group has one row
        opened = {key: self._open(row) for key, row in once.items()}
        return [own_copy(opened[id(row)]) for row in rows]

    def draw(self, prompts: PromptStream | Curriculum, count: int) -> list[Row]:
        """Return the next ``count`` rows, the same on every process.

        With ``on_bad_image="skip"`` they are those whose images can be read. Each process tries its
        own and tells the others: what one cannot read all replace by the row that comes next.

        Raises:
            ValueError: images of ten rows in a row cannot be read.
        """
        rows = prompts.take(count)
        check_prompts(rows)
        if self._args.on_bad_image == "error":
            return rows
        for _ in range(_ROUNDS):
            bad = self._unreadable(rows)
            if not bad:
                return rows
            others = prompts.take(len(bad))
            check_prompts(others)
            for index, row in zip(bad, others, strict=True):
                rows[index] = row
        raise ValueError(
            f"images: expected some that can be read among {_ROUNDS} rows, got none; the log says "
            "what is wrong with each"
        )

    def _unreadable(self, rows: list[Row]) -> list[int]:
        """Return where the rows stand with images that a process cannot read. All call it."""
        size = self._args.num_generations
        places = range(len(rows) * size)[share(len(rows) * size, self._accelerator)]
        bad = torch.zeros(len(rows), device=self._accelerator.device)
        for index in sorted({place // size for place in places}):
            try:
                self._open(rows[index])
            except ImageError as error:
                bad[index] = 1
                logger.warning("a row is skipped: %s", error)
        return self._accelerator.reduce(bad).nonzero()[:, 0].tolist()

    def _open(self, row: Row) -> Row:
        if not isinstance(row, NumberedRow):
            return open_images(row, self._media)
        if row.opened is None:  # a URL might not answer a second time
            row.opened = open_images(row, self._media)
        return row.opened
