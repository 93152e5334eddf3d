"""Work beside the caller's thread: coroutines in one event loop, functions in a thread each.

The loop lives as long as the process, so that a client which a function keeps between calls stays
usable: such clients belong to the loop that they were made in. No thread keeps the process alive.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def start(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Run them together. The first failure, or cancelling the future, cancels all."""
    if not coroutines:
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing
    return asyncio.run_coroutine_threadsafe(_together(coroutines), _loop(os.getpid()))


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


async def _together(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
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
