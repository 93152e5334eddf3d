"""A field of GRPOConfig with its line of ``grpo-train --help``."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field; ``metadata`` is for its argument on the command line."""
    return field(default=default, metadata={"help": text, **metadata})
