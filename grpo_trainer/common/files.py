"""Files that are whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield where to write what then takes the place of ``path``, at once."""
    aside = path.with_name(f"incomplete-{path.name}")
    yield aside
    aside.replace(path)
