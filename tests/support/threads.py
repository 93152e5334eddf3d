"""Threads that rollouts run on."""

from __future__ import annotations

import threading
import time


def rollouts_end(seconds: float = 30) -> bool:
    """Return whether every thread of rollouts ends within ``seconds``.

    A thread sets its result, or is left behind by a conversation that failed, before it ends.
    """
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == "rollouts":
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.name == "rollouts" for thread in threading.enumerate())
