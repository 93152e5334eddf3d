"""The run's log: everything goes to a file, and what a reader wants at once to the terminal too."""

from __future__ import annotations

import sys
from pathlib import Path

_LARGEST = 8 << 20  # characters; the file has to be carried


class Log:
    """Writes to ``path``, which stops growing at a size that can still be carried."""

    def __init__(self, path: Path, largest: int = _LARGEST) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("w", encoding="utf-8")
        self._left = largest

    def say(self, text: str) -> None:
        """A line for both."""
        self.tee(f"{text}\n")

    def tee(self, text: str) -> None:
        """Output of a process, for both."""
        sys.stdout.write(text)
        sys.stdout.flush()
        self.keep(text)

    def keep(self, text: str) -> None:
        """For the file alone."""
        if self._left > 0:
            self._file.write(text[: self._left])
            self._left -= len(text)
            if self._left <= 0:
                self._file.write("\n[the log ends here: it is full]\n")
            self._file.flush()

    def end(self, text: str) -> None:
        """The last lines, for both, however full the file is."""
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        self._file.write(f"{text}\n")
        self._file.close()
