"""Completions, and one check of them for engines, servers and functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from grpo_trainer.common import shortened

TokenIds = list[int]

NEVER = -9999.0  # vLLM's replacement for minus infinity, which JSON does not have
_ROUNDING = 1e-2  # a log-probability may exceed 0 by this much


class Completion(NamedTuple):
    """One completion, up to and including its first end-of-sequence token."""

    token_ids: TokenIds
    # per token, under the distribution it was sampled from; None: not reported
    logprobs: list[float] | None = None
    # per token, the ids that the sampling filters kept; None: not requested
    sampling_mask: list[TokenIds] | None = None
    # per token, which weights sampled it: an engine reports the number of updates before, a sampler
    # the number of optimizer steps; None: the same weights for all tokens
    versions: list[int] | None = None
    # (tokens, layers, K) integers: the experts of prompt and completion, except for the last
    # token, which was not run; -1: unknown; None: not reported
    routed_experts: Tensor | None = None

    def checked(
        self, *, max_tokens: int, vocab_size: int | None, eos_token_ids: Collection[int] = ()
    ) -> Completion:
        """Return it as Python numbers.

        Args:
            max_tokens: its largest length.
            vocab_size: ids must be below it; None: unknown.
            eos_token_ids: it ends with the first of these; empty: it may have several turns.

        Raises:
            ValueError: it is out of bounds; the message says what was expected and what it got.
        """
        ids, logprobs, mask = checked_ids(self.token_ids, vocab_size), self.logprobs, None
        if not 0 < len(ids) <= max_tokens:
            raise ValueError(f"expected 1 to {max_tokens} tokens, got {len(ids)}")
        check_length("log-probability", logprobs, len(ids))
        check_length("sampling mask", self.sampling_mask, len(ids))
        check_length("version", self.versions, len(ids))
        for place, token in enumerate(ids[:-1]):
            if token in eos_token_ids:
                raise ValueError(
                    "expected no token after the first end-of-sequence token, got "
                    f"{token} as token {place + 1} of {len(ids)}"
                )
        if logprobs is not None:
            logprobs = [checked_logprob(value) for value in logprobs]
        if self.sampling_mask is not None:
            mask = [checked_ids(left, vocab_size) for left in self.sampling_mask]
        experts = self.routed_experts
        if experts is not None:
            experts = checked_experts(experts)
        return Completion(ids, logprobs, mask, self.versions, experts)


class Completions(NamedTuple):
    """Completions, one per prompt: the columns of :class:`Completion`."""

    token_ids: list[TokenIds]
    logprobs: list[list[float]] | None = None
    sampling_mask: list[list[TokenIds]] | None = None
    versions: list[list[int]] | None = None
    routed_experts: list[Tensor] | None = None

    @classmethod
    def of(cls, rows: Sequence[Completion]) -> Completions:
        """Return completions as columns. A column is None if any completion lacks it."""
        columns: dict[str, Any] = {
            name: [getattr(row, name) for row in rows] for name in cls._fields
        }
        lacking = [name for name in cls._fields[1:] if any(one is None for one in columns[name])]
        return cls(**columns | dict.fromkeys(lacking))

    def rows(self) -> Iterator[Completion]:
        """Return the completions one by one."""
        columns = [repeat(None) if column is None else column for column in self]
        return (Completion(*row) for row in zip(*columns, strict=False))

    def checked(self, count: int, **limits: Any) -> Completions:
        """Return them as Python numbers. ``limits`` are the arguments of
        :meth:`Completion.checked`.

        Raises:
            ValueError: there are not ``count`` completions, or one of them is out of bounds.
        """
        for name, column in self._asdict().items():
            if column is None and name != "token_ids":
                continue
            if not isinstance(column, list | tuple):
                raise ValueError(f"expected a list of {name}, got {shortened(column)}")
            if len(column) != count:
                raise ValueError(f"expected {name} for {count} completions, got {len(column)}")
        rows = []
        for number, row in enumerate(self.rows()):
            try:
                rows.append(row.checked(**limits))
            except ValueError as error:
                raise ValueError(f"completion {number}: {error}") from error
        return Completions.of(rows)


def check_length(what: str, column: Any, count: int) -> None:
    """Raise ValueError unless ``column`` is None or has a value for each of ``count`` tokens."""
    size = len(column) if hasattr(column, "__len__") else type(column).__name__
    if column is not None and size != count:
        raise ValueError(f"expected one {what} per token, got {size} for {count}")


def checked_ids(ids: Any, vocab_size: int | None, what: str = "token ids") -> TokenIds:
    """Return token ids as Python integers; ValueError unless all are ids below ``vocab_size``."""
    if not isinstance(ids, list | tuple):
        raise ValueError(f"expected a list of {what}, got {shortened(ids)}")
    end = math.inf if vocab_size is None else vocab_size
    for token in ids:
        # True is an int in Python; lists made from arrays may have numpy integers
        whole = type(token) is int or isinstance(token, np.integer)
        if not whole or not 0 <= token < end:
            below = "" if vocab_size is None else f" < {vocab_size}"
            raise ValueError(f"expected {what} 0 <= id{below}, got {token!r}")
    return [int(token) for token in ids]


def checked_experts(experts: Any) -> Tensor:
    """Return a tensor or array of experts, (tokens, layers, K), in the smallest dtype; ValueError
    for anything else."""
    array = np.asarray(experts)
    if (
        array.ndim != 3
        or not np.issubdtype(array.dtype, np.integer)
        or not array.size
        or array.min() < -1
    ):
        raise ValueError(
            "expected routed_experts as integers >= -1, (tokens, layers, experts per token), "
            f"got {shortened(experts)}"
        )
    small = array.min() >= 0 and array.max() <= np.iinfo(np.uint8).max
    return torch.tensor(array.astype(np.uint8 if small else np.int16))


def checked_logprob(value: Any) -> float:
    """Return a log-probability, NaN for an unknown one; ValueError if it is above 0."""
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected log-probabilities, got {shortened(value)}") from error
    if number > _ROUNDING:
        raise ValueError(f"expected log-probabilities of at most 0, got {number}")
    return math.nan if number <= NEVER else number
