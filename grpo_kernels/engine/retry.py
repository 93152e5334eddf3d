"""Out of memory is met once, by less work at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch

from grpo_kernels.engine.route import Path

Way = TypeVar("Way")
Result = TypeVar("Result")

FEWER_ROWS = 4  # the second way has a tile of so many times fewer rows
SPOILED_SUM = (
    "weight_grad now holds a part of this call's gradient, so nothing was tried again. Clear it "
    "before the step is repeated, with a smaller max_workspace_bytes"
)
# torch's CPU allocator has no exception of its own
_OF_THE_CPU = "can't allocate memory"


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch had no memory left for a tensor."""
    return isinstance(error, torch.OutOfMemoryError) or _OF_THE_CPU in str(error)


def first_that_fits(
    run: Callable[[Way], Result],
    ways: Iterable[Way],
    advice: Callable[[Way], str],
    left_behind: Callable[[Way], str | None] = lambda way: None,
) -> Result:
    """``run`` of the first of ``ways`` for which the memory lasts; each is tried once.

    What a failed try has allocated is free again before the next. A warning says what happened, and
    by ``advice`` what to set so that it does not happen again. Where a failed try leaves something
    behind, there is no second one, and the error says what it is.

    Raises:
        RuntimeError: the last way's, if the memory lasts for none.
    """
    remaining = iter(ways)
    way, failed = next(remaining), 0
    while True:
        following: Way | None = None
        try:
            result = run(way)
            break
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if (what := left_behind(way)) is not None:
                raise torch.OutOfMemoryError(f"{error}\n{what}") from error
            following = next(remaining, None)
            if following is None:
                raise
        # here, where the traceback and with it the tensors of the failed try are gone
        way, failed = following, failed + 1
    if failed:
        warnings.warn(
            f"out of memory: {'a second' if failed == 1 else 'a third'} try, with less work at a "
            f"time, went through. {advice(way)} avoids the failed one",
            RuntimeWarning,
            stacklevel=2,
        )
    return result


def fewer_rows(path: Path) -> list[Path]:
    """A path, and the same with a smaller tile if there is one."""
    rows = path.tile_rows // FEWER_ROWS
    return [path, replace(path, tile_rows=rows)] if rows else [path]


def forward_ways(path: Path) -> list[Path]:
    """Of a forward: without a tile nothing is smaller, and a fixed one decides a row's bits."""
    fixed = path.linear_stats is not None or path.fixed_rows is not None
    return [path] if fixed else fewer_rows(path)


def smaller_tile(columns: int, dtype: torch.dtype) -> Callable[[Path], str]:
    """The advice for a tile of ``columns`` logits of ``dtype``."""
    return lambda path: f"max_workspace_bytes={path.tile_rows * columns * dtype.itemsize}"
