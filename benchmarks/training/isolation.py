"""What one trainer patches must not reach the others in the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def own_globals(mine: dict[str, Any]) -> Iterator[None]:
    """Give the model's module the names of ``mine``; the block's replacements are added to them.

    Liger replaces functions and classes of the module of every model of its kind.
    """
    from transformers.models.qwen2 import modeling_qwen2

    current = vars(modeling_qwen2)
    before = dict(current)
    current.update(mine)
    try:
        yield
    finally:
        replaced = {name: x for name, x in current.items() if before.get(name) is not x}
        mine.update(replaced)
        current.update(before)
