"""README and the pages of docs, wherever in them something stands."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
DOCS = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def block(text: str, language: str, mentioning: str) -> str:
    """Return the one block of code that has these words."""
    (found,) = [block for block in blocks(text, language) if mentioning in block]
    return found


def python_block(text: str, mentioning: str) -> str:
    return block(text, "python", mentioning)


def with_settings(code: str, settings: str) -> str:
    """Return code with other settings in place of its ``output_dir``."""
    made, found = re.subn(r'output_dir="out-[\w-]+"', settings, code)
    assert found == 1, code
    return made


def section(text: str, title: str) -> str:
    """Return what stands under a heading, up to the next one of its level or above."""
    marks, _, rest = re.split(rf"^(#+) ({re.escape(title)})$", text, maxsplit=1, flags=re.M)[1:]
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, maxsplit=1, flags=re.M)[0]


def code(text: str) -> set[str]:
    """Return the words that stand between backticks."""
    return set(re.findall(r"`(\w+)`", text))
