"""What an engine answers: completions, and one check of them for engines, servers and functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from grpo_trainer.common import shortened

TokenIds = list[int]

NEVER = -9999.0  # vLLM's stand-in for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # a log-probability may exceed 0 by this much


class Completion(NamedTuple):
    """One completion up to and including its first end-of-sequence token."""

    token_ids: TokenIds
    # of each token, under the distribution it was drawn from; None: the engine does not say
    logprobs: list[float] | None = None
    # of each token, the ids that the sampling filters left to choose from; None: not asked for
    sampling_mask: list[TokenIds] | None = None


class Completions(NamedTuple):
    """The columns of several of them, one per prompt."""

    token_ids: list[TokenIds]
    logprobs: list[list[float]] | None = None
    sampling_mask: list[list[TokenIds]] | None = None

    def rows(self) -> Iterator[Completion]:
        """Return each completion."""
        others = self.logprobs or repeat(None), self.sampling_mask or repeat(None)
        return map(Completion, self.token_ids, *others)

    def checked(self, count: int, bounds: Bounds) -> Completions:
        """Return them as Python's numbers.

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
        rows = []
        for number, row in enumerate(self.rows()):
            try:
                rows.append(bounds.checked(*row))
            except ValueError as error:
                raise ValueError(f"completion {number}: {error}") from error
        logprobs: list[Any] = [row.logprobs for row in rows]
        masks: list[Any] = [row.sampling_mask for row in rows]
        return Completions(
            [row.token_ids for row in rows],
            None if self.logprobs is None else logprobs,
            None if self.sampling_mask is None else masks,
        )


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What a completion must keep to."""

    max_tokens: int
    vocab_size: int | None = None  # ids are below it; None: it is not known
    # a completion ends with the first of these; empty: it may have several turns
    eos_token_ids: frozenset[int] = frozenset()

    def checked(
        self,
        ids: Any,
        logprobs: Sequence[Any] | None = None,
        sampling_mask: Sequence[Any] | None = None,
    ) -> Completion:
        """Return a completion as Python's numbers.

        Raises:
            ValueError: it is out of bounds; the message says what was expected and what came.
        """
        ids = checked_ids(ids, self.vocab_size)
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"expected 1 to {self.max_tokens} tokens, got {len(ids)}")
        check_length("log-probability", logprobs, len(ids))
        check_length("sampling mask", sampling_mask, len(ids))
        for place, token in enumerate(ids[:-1]):
            if token in self.eos_token_ids:
                raise ValueError(
                    "expected no token after the first end-of-sequence token, got "
                    f"{token} as token {place + 1} of {len(ids)}"
                )
        numbers = None if logprobs is None else [checked_logprob(value) for value in logprobs]
        if sampling_mask is not None:
            sampling_mask = [checked_ids(left, self.vocab_size) for left in sampling_mask]
        return Completion(ids, numbers, sampling_mask)


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
