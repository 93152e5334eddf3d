"""Tuned tile sizes. Written by ``make gpu-tune``; a change by hand is lost at its next run.

What is missing here runs with the defaults of ``rows.py`` and ``linear.py``, which also say what
the keys mean.
"""

from __future__ import annotations

# device class, kernel, bits of a logit, vocabulary -> warps, 16-byte loads of a thread
ROW_CONFIGS: dict[tuple[str, str, int, str], tuple[int, int]] = {}

# device class, kernel, bits of a logit, width, vocabulary -> see ``LinearConfig``
LINEAR_CONFIGS: dict[tuple[str, str, int, str, str], tuple[int, ...]] = {}

# device class, bits of a logit, vocabulary -> rows of the logits tile
CHUNK_ROWS: dict[tuple[str, int, str], int] = {}
