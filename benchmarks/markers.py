"""The numbers in the documents: text between markers, made from the result files.

``<!-- results: NAME ARGUMENTS -->anything<!-- /results -->`` holds what the generator NAME says.
Code fences and code spans are left alone.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from benchmarks.context import Context, NotMeasuredError
from benchmarks.generators import GENERATORS, NOT_MEASURED
from benchmarks.load import RESULTS, Device

ROOT = RESULTS.parent.parent
_PLACES = re.compile(
    r"(?P<code>^[ \t]*```.*?^[ \t]*```|`[^`\n]*`)"
    r"|(?P<open><!-- results: (?P<call>[^\n]*?) -->)(?P<body>.*?)(?P<close><!-- /results -->)",
    re.DOTALL | re.MULTILINE,
)
_STRAY = re.compile(r"<!-- /?results.*")


def documents() -> list[Path]:
    """The files whose numbers come from measurements."""
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md")
    return [*(ROOT / name for name in names), *sorted((ROOT / "docs").rglob("*.md"))]


def rewrite_documents(devices: dict[str, Device]) -> Iterator[Path]:
    """Rewrites what changed, and names it."""
    for path in documents():
        old = path.read_text()
        new = rewrite(old, context_for(path, devices), str(path))
        if new != old:
            path.write_text(new)
            yield path


def rewrite(document: str, context: Context, name: str) -> str:
    """``document`` with every marked place made anew; ``name`` is for errors."""
    check_markers(document, name)

    def fill(match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        return f"{match['open']}{generate(match['call'], context, name)}{match['close']}"

    return _PLACES.sub(fill, document)


def check_markers(document: str, name: str) -> None:
    """Every opening marker has its end, and none is inside another."""
    outside = _PLACES.sub("", document)
    inside = "\n".join(match["body"] or "" for match in _PLACES.finditer(document))
    if stray := _STRAY.search(outside) or _STRAY.search(inside):
        raise ValueError(
            f"{name}: expected <!-- results: NAME ARGUMENTS --> and <!-- /results --> in turn, "
            f"got {stray[0]!r} alone"
        )


def without_marked(document: str) -> str:
    """What was written by hand, with line breaks where they were; code spans are kept."""

    def strip(match: re.Match[str]) -> str:
        fenced = match["code"] and match["code"].lstrip().startswith("```")
        kept = match["code"] and not fenced
        return match[0] if kept else "\n" * match[0].count("\n")

    return _PLACES.sub(strip, document)


def generate(call: str, context: Context, name: str) -> str:
    """The text for a marker's ``NAME ARGUMENTS``."""
    words = shlex.split(call)
    if not words or words[0] not in GENERATORS:
        known = ", ".join(sorted(GENERATORS))
        raise ValueError(f"{name}: results: expected one of {known}, got {call!r}")
    generator, *arguments = GENERATORS[words[0]], *words[1:]
    try:
        generator.check(arguments, context)
        text = generator.call(context, *arguments)
    except NotMeasuredError:
        text = NOT_MEASURED
    except ValueError as error:
        raise ValueError(f"{name}: results: {call}: {error}") from None
    return f"\n\n{text}\n\n" if generator.block else text


def context_for(document: Path, devices: dict[str, Device]) -> Context:
    """With the folder of results as links in ``document`` name it."""
    link = Path(os.path.relpath(RESULTS, document.parent)).as_posix()
    return Context(devices=devices, results=link)
