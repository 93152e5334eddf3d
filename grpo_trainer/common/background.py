"""One event loop for asynchronous reward functions.

It lives as long as the process, so that a client which a function keeps between calls stays usable:
such clients belong to the loop that they were made in.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


def start(coroutines: list[Coroutine[Any, Any, Any]]) -> Future[list[Any]]:
    """Runs them together. The first failure, or cancelling the future, cancels all."""
    if not coroutines:
        nothing: Future[list[Any]] = Future()
        nothing.set_result([])
        return nothing
    return asyncio.run_coroutine_threadsafe(_together(coroutines), _loop(os.getpid()))


async def _together(coroutines: list[Coroutine[Any, Any, Any]]) -> list[Any]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of process ``pid``: a fork inherits the loop, but not the thread that runs it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rewards", daemon=True).start()
    return loop
