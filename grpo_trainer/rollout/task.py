"""Work on a thread of its own, whose outcome is asked for later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """Calls ``work`` at once, on a thread that does not keep the process alive."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._outcome: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
        self._thread.start()

    def result(self) -> T:
        """Waits for what ``work`` returns, or raises what it raised, with that traceback."""
        self.wait()
        if self._error is not None:
            raise self._error
        return self._outcome[0]

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            self._outcome.append(self._work())
        except BaseException as error:  # raised again where the result is asked for
            self._error = error
