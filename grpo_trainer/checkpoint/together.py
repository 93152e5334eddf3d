"""Errors that every process raises, so that none waits for one that has left."""

from __future__ import annotations

from accelerate import Accelerator
from accelerate.utils import gather_object


class StartError(ValueError):
    """Training cannot begin as it was asked for."""


def raise_together(accelerator: Accelerator, problem: str | None) -> None:
    """Raise StartError on all processes if one has a ``problem``. Every process calls it."""
    problems = [text for text in gather_object([problem]) if text is not None]
    if problems:
        raise StartError(problems[0])
