"""Text that others wrote, as a terminal may be given it."""

from __future__ import annotations

import re

# control characters but newline and tab, what turns the direction of writing around, half pairs
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return ``text`` with its control characters written out, as in ``\x1b[2J``.

    A terminal would obey them: clear itself, rename its window, fill the clipboard.
    """
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
