"""What an engine answers: completions, and one check of them for engines, servers and functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from grpo_trainer.common import shortened

TokenIds = list[int]
# a completion: its ids, the log-probability of each, and which ids each was chosen from
Row: TypeAlias = tuple[TokenIds, list[float] | None, list[TokenIds] | None]

NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # a log-probability may exceed 0 by this much


class Completions(NamedTuple):
    """Completions, each up to and including its first end-of-sequence token: one per prompt."""

    token_ids: list[TokenIds]
    # of each token, under the distribution it was drawn from; None: the engine does not say
    logprobs: list[list[float]] | None = None
    # of each token, the ids that the sampling filters left to choose from; None: not asked for
    sampling_mask: list[list[TokenIds]] | None = None

    def rows(self) -> Iterator[Row]:
        """Return token ids, log-probabilities and sampling mask of each completion."""
        others = self.logprobs or repeat(None), self.sampling_mask or repeat(None)
        return zip(self.token_ids, *others, strict=False)

    def checked(self, count: int, **limits: Any) -> Completions:
        """Return them as Python's numbers. ``limits`` are those of :func:`checked_completion`.

        Raises:
            ValueError: they are not those of ``count`` prompts, or one of them is out of bounds.
        """
        for name, column in self._asdict().items():
            if column is None and name != "token_ids":
                continue
            if not isinstance(column, list | tuple):
                raise ValueError(f"expected a list of {name}, got {shortened(column)}")
            if len(column) != count:
                raise ValueError(f"expected {name} of {count} completions, got {len(column)}")
        rows: list[Any] = []
        for number, row in enumerate(self.rows()):
            try:
                rows.append(checked_completion(*row, **limits))
            except ValueError as error:
                raise ValueError(f"completion {number}: {error}") from error
        return Completions(
            [ids for ids, _, _ in rows],
            None if self.logprobs is None else [logprobs for _, logprobs, _ in rows],
            None if self.sampling_mask is None else [mask for _, _, mask in rows],
        )


def checked_completion(
    ids: Any,
    logprobs: Sequence[Any] | None = None,
    sampling_mask: Sequence[Any] | None = None,
    *,
    max_tokens: int,
    vocab_size: int | None,
    eos_token_ids: Collection[int] = (),
) -> Row:
    """Return a completion as Python's numbers.

    Args:
        ids, logprobs, sampling_mask: the completion, as in :class:`Completions`.
        max_tokens: its largest length.
        vocab_size: ids are below it; None: it is not known.
        eos_token_ids: it ends with the first of these; empty: it may have several turns.

    Raises:
        ValueError: it is out of bounds; the message says what was expected and what came.
    """
    ids = checked_ids(ids, vocab_size)
    if not 0 < len(ids) <= max_tokens:
        raise ValueError(f"expected 1 to {max_tokens} tokens, got {len(ids)}")
    check_length("log-probability", logprobs, len(ids))
    check_length("sampling mask", sampling_mask, len(ids))
    for place, token in enumerate(ids[:-1]):
        if token in eos_token_ids:
            raise ValueError(
                "expected no token after the first end-of-sequence token, got "
                f"{token} as token {place + 1} of {len(ids)}"
            )
    numbers = None if logprobs is None else [checked_logprob(value) for value in logprobs]
    if sampling_mask is not None:
        sampling_mask = [checked_ids(left, vocab_size) for left in sampling_mask]
    return ids, numbers, sampling_mask


def check_length(what: str, column: Any, count: int) -> None:
    """Raise ValueError unless ``column`` is None or has a value for each of ``count`` tokens."""
    size = len(column) if hasattr(column, "__len__") else type(column).__name__
    if column is not None and size != count:
        raise ValueError(f"expected one {what} per token, got {size} for {count}")


def checked_ids(ids: Any, vocab_size: int | None, what: str = "token ids") -> TokenIds:
    """Return token ids as Python's integers; ValueError unless all are ids below ``vocab_size``."""
    if not isinstance(ids, list | tuple):
        raise ValueError(f"expected a list of {what}, got {shortened(ids)}")
    end = math.inf if vocab_size is None else vocab_size
    for token in ids:
        # True is an int to Python; arrays that were made a list have integers of numpy
        whole = type(token) is int or isinstance(token, np.integer)
        if not whole or not 0 <= token < end:
            below = "" if vocab_size is None else f" < {vocab_size}"
            raise ValueError(f"expected {what} 0 <= id{below}, got {token!r}")
    return [int(token) for token in ids]


def checked_logprob(value: Any) -> float:
    """Return a log-probability, NaN for an unknown one; raise ValueError if it is above 0."""
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected log-probabilities, got {shortened(value)}") from error
    if number > _ROUNDING:
        raise ValueError(f"expected log-probabilities of at most 0, got {number}")
    return math.nan if number <= NEVER else number
