"""What only watches a run does not end it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
