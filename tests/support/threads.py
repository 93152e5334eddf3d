"""Threads that rollouts run on."""

from __future__ import annotations

import threading
import time


def rollouts_end(seconds: float = 30) -> bool:
    """Return whether every thread of rollouts ends within ``seconds``.

    A thread ends a moment after it sets its result. If a conversation fails, the threads of the
    others finish what they are doing.
    """
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.name == "rollouts" for thread in threading.enumerate())
