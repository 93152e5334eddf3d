"""Work beside the main thread, and work that may fail."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_warned: set[tuple[str, type]] = set()


@contextmanager
def unfailing(what: str) -> Iterator[None]:
    """Go on after any error inside, with one warning for each kind of them.

    Nothing inside may wait for other processes: one that fails would not come.

    Args:
        what: what is missing then, with the folder of the run.
    """
    try:
        yield
    except Exception as error:
        kind = (what, type(error))
        if kind not in _warned:
            _warned.add(kind)
            logger.warning("%s: the run goes on without: %s: %s", what, kind[1].__name__, error)


T = TypeVar("T")


def start(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Run them together. The first failure, or cancelling the future, cancels all."""
    if not coroutines:
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing
    return asyncio.run_coroutine_threadsafe(together(coroutines), _loop(os.getpid()))


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Call ``work`` at once, on a thread of its own."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # raised again where the result is asked for
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


async def together(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run them at the same time. The first failure cancels all."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the loop of process ``pid``: a fork inherits it, but not the thread that runs it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="coroutines", daemon=True).start()
    return loop
