"""What cases on ranks share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def expect(match: str, call: Callable[[], object]) -> None:
    """Assert that a call raises a ValueError with such a message."""
    with pytest.raises(ValueError, match=match):
        call()
