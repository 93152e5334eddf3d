"""Call reward functions, check their results, and store what they log."""

from __future__ import annotations

import logging
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.common import message_of, plain, shortened, start
from grpo_trainer.monitor import OWN_COLUMNS, REWARD_PREFIX, is_own_metric, value_metric

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 300
# errors raised by rewards that expect text and get messages
_MESSAGE_ERRORS = (AttributeError, KeyError, TypeError)
_MAX_REWARD = 1e30  # so that weighted sums and standard deviations fit in fp32

# reward functions get these under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class RewardError(RuntimeError):
    """A reward function raised; says which one, on which line, and with which arguments."""


class RewardLog:
    """Columns and metrics that reward functions add for one batch of ``count`` completions."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}  # lists of ``count`` values

    def log_extra(self, column: str, values: list[Any]) -> None:
        """Add a column to the table of completions, one value per completion.

        Values other than numbers, text, lists and dictionaries are stored as text.

        Raises:
            ValueError: the table already has this column, or the number of values is wrong.
        """
        if column in OWN_COLUMNS or column.startswith(REWARD_PREFIX):
            raise ValueError(f"log_extra: expected a new column, got {column!r}, which exists")
        if len(values) != self._count:
            raise ValueError(
                f"log_extra: expected {self._count} values of {column!r}, one per completion, "
                f"got {len(values)}"
            )
        self.columns[column] = [plain(value) for value in values]  # checkpoints store them, too

    def log_metric(self, name: str, value: float) -> None:
        """Add a sample to a metric, which is logged as the mean of its samples.

        Raises:
            ValueError: the value is not a finite number, or the trainer has a metric of this name.
        """
        if is_own_metric(name):
            raise ValueError(
                f"log_metric: expected a new name, got {name!r}, which the trainer logs"
            )
        if not isinstance(value, numbers.Real) and hasattr(value, "item"):
            value = value.item()
        if not isinstance(value, numbers.Real) or not abs(value) <= sys.float_info.max:
            raise ValueError(f"log_metric: expected a finite number for {name!r}, got {value!r}")
        self._metrics.setdefault(name, []).append(float(value))

    def metrics(self, accelerator: Accelerator) -> Metrics:
        """Return this process's samples. All processes call it and get the same names."""
        samples = {name: self._metrics.get(name, []) for name in gather_object([*self._metrics])}
        return Metrics.merge(
            value_metric(name, sum(values), accelerator.device, len(values))
            for name, values in sorted(samples.items())
        )


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the name it is logged under.

    Its keyword arguments are ``prompts``, ``completions``, ``completion_ids``, one list per other
    dataset column, ``trainer_state``, ``log_extra`` and ``log_metric``. It returns one number per
    completion, or None or NaN if it does not apply.
    """

    name: str
    function: Callable[..., Any]
    is_async: bool = False


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the columns that reward functions get from rows.

    Raises:
        ValueError: rows have different columns.
    """
    if any(row.keys() != rows[0].keys() for row in rows):
        kinds = sorted({", ".join(sorted(row)) or "none" for row in rows})
        raise ValueError(
            f"prompts: expected the same columns in the rows of all samples, got {'; '.join(kinds)}"
        )
    names = [name for name in rows[0] if name not in _NOT_COLUMNS]
    return {name: [row[name] for row in rows] for name in names}


def score(rewards: list[RewardFunction], count: int, arguments: dict[str, Any]) -> Tensor:
    """Return rewards (count, F) fp32 on the CPU; NaN if a function does not apply.

    Asynchronous functions run together in an event loop on another thread, because the caller may
    already run a loop, as a notebook does. Meanwhile the other functions run one by one.

    Raises:
        ValueError: a function does not accept its arguments, or returned the wrong number or type
            of values.
        RewardError: a function raised.
    """
    asynchronous = [reward for reward in rewards if reward.is_async]
    pending = start([_await(reward, arguments) for reward in asynchronous])
    results: dict[str, Any] = {}
    try:
        for reward in rewards:
            if not reward.is_async:
                with _explaining_errors(reward, arguments):
                    results[reward.name] = reward.function(**arguments)
        results |= zip((reward.name for reward in asynchronous), pending.result(), strict=True)
    finally:
        pending.cancel()  # when another function failed
    columns = [_column(reward.name, results[reward.name], count) for reward in rewards]
    scores = torch.tensor(columns, dtype=torch.float32).T
    unscored = scores.isnan().all(1).nonzero().flatten().tolist()
    if unscored:
        logger.warning(
            "reward functions: %s returned None or NaN for %d of %d completions, so their "
            "advantage is 0; the first prompt is %s",
            ", ".join(repr(reward.name) for reward in rewards),
            len(unscored),
            count,
            shortened(arguments["prompts"][unscored[0]], _SHOWN_CHARACTERS),
        )
    return scores


async def _await(reward: RewardFunction, arguments: dict[str, Any]) -> Any:
    with _explaining_errors(reward, arguments):
        return await reward.function(**arguments)


@contextmanager
def _explaining_errors(reward: RewardFunction, arguments: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = f"reward function {reward.name!r} raised {type(error).__name__}: "
        message += f"{message_of(error)}; "
        frames = list(traceback.walk_tb(error.__traceback__))
        entered = not (isinstance(error, TypeError) and len(frames) == 2)
        if not entered:
            message += f"expected it to accept **kwargs, or each of {', '.join(arguments)}; "
        elif len(frames) > 2:  # in Python
            frame, line = frames[2]
            message += f"in {Path(frame.f_code.co_filename).name}, line {line}; "
        messages = not isinstance(next(iter(arguments.get("completions", ())), ""), str)
        if entered and messages and isinstance(error, _MESSAGE_ERRORS):
            message += (
                "if prompts are messages, a completion is a list of messages: its text is "
                'completion[-1]["content"], or grpo_trainer.rewards.text_of(completion); '
            )
        first = [
            f"{name[:-1]} {shortened(arguments[name][0], _SHOWN_CHARACTERS)}"
            for name in ("prompts", "completions")
            if arguments.get(name)
        ]
        count = len(arguments.get("completions", ()))
        message += f"it was called with {count} completions, the first of them: {', '.join(first)}"
        error_class = RewardError if entered else ValueError  # ValueError: a wrong signature
        raise error_class(message) from error


def _column(name: str, values: Any, count: int) -> list[float]:
    """Return the result of a function as numbers, NaN for None."""

    def unexpected(expected: str, got: Any) -> ValueError:
        return ValueError(f"reward function {name!r}: expected {expected}, got {got}")

    if hasattr(values, "tolist"):  # torch or numpy
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise unexpected(f"a list of {count} numbers", type(values).__name__)
    if len(values) != count:
        raise unexpected(f"{count} rewards, one per completion", len(values))
    column = []
    for value in values:
        if value is None:
            value = math.nan
        if hasattr(value, "item") and math.prod(value.shape) == 1:  # a numpy or torch number
            value = value.item()
        if not isinstance(value, numbers.Real):
            raise unexpected("numbers or None", type(value).__name__)
        size: Any = abs(value)
        if size > _MAX_REWARD:
            number = value if isinstance(value, float) else f"a larger {type(value).__name__}"
            raise unexpected(f"finite numbers up to {_MAX_REWARD:g}", number)
        column.append(float(value))
    return column
