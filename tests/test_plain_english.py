"""Documents and the text of code are plain American English, and the documents stay short."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.prose import (
    CODE,
    DOCUMENTS,
    FREQUENT,
    GUIDES,
    ROOT,
    old_style,
    prose,
    readable,
    words,
)

WORDS = 27_000  # of README, CONTRIBUTING and docs, without code and generated blocks
PER_THOUSAND = {  # the most in a thousand words of documents, and of code
    "whose": (0.3, 0.5),
    "that of": (0.3, 0.2),
    "what is": (1.0, 0.7),
    "takes": (0.3, 0.5),
    "Where ...,": (0.05, 0.05),
    "Of ...": (0.05, 0.05),
}
_OLD = """With this page you replace the loss.
Bring a loss of your own.
It runs on CPUs alone.
A budget that is too small is refused.
What it costs stands beside it.
All but for the head are made of tiles.
Where memory is short, take two passes.
A token whose advantage is zero takes no work, and that of others does what is needed.
Of these, none matters."""
_PLAIN = """Replace the loss in your own training loop.
It runs only on CPUs, next to a stand-in; "Connection refused" is vLLM's error.
`alone` is a column, and [this](of-its-own.md) is a link.
It raises a ValueError; the noise rises by a factor. Standalone files are fine."""


@pytest.mark.parametrize("path", [*DOCUMENTS, *CODE], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_of_the_old_style(path: Path) -> None:
    assert list(old_style(readable(path))) == []


@pytest.mark.parametrize("place", range(2), ids=["documents", "code"])
def test_frequent_words(place: int) -> None:
    text = "\n".join(map(readable, (DOCUMENTS, CODE)[place]))
    thousands = len(text.split()) / 1000
    found = {name: len(pattern.findall(text)) / thousands for name, pattern in FREQUENT.items()}
    assert {n: x for n, x in found.items() if x > PER_THOUSAND[n][place]} == {}


def test_documents_are_short() -> None:
    assert sum(map(words, GUIDES)) <= WORDS


def test_every_page_links_to_the_glossary() -> None:
    pages = [path for path in GUIDES if "reference" not in path.parts and path.parent != ROOT]
    assert len(pages) > 30
    without = [path.name for path in pages if "glossary.md" not in path.read_text()]
    assert without == ["glossary.md"]


def test_the_old_style_is_seen() -> None:
    lines = _OLD.splitlines()
    assert [line for line in lines[:6] if not list(old_style(line))] == []
    frequent = [name for name, pattern in FREQUENT.items() if pattern.search(_OLD)]
    assert frequent == list(FREQUENT)


def test_plain_words_are_free(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{_PLAIN}\n```\nalone\n```\n<!-- [[[cog x ]]] -->\nkin\n<!-- [[[end]]] -->\n")
    assert list(old_style(readable(page))) == []
    assert prose(page.read_text()).split()[-1] == "fine."
    code = tmp_path / "code.py"
    code.write_text('alone = 1  # the tile stands alone\nkin = "a mended kin"\n')
    assert len(list(old_style(readable(code)))) == 4
