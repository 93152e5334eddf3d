"""How a command ends for what the user can put right."""

from __future__ import annotations

import sys
from typing import NoReturn

from grpo_trainer.common import printable


def fail(message: str) -> NoReturn:
    """Print one line to stderr, and exit with code 2."""
    print(f"grpo-train: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    raise SystemExit(2)
