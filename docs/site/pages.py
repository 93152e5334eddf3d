"""Convert the text of pages: links, GitHub lists, help texts, notebooks."""

from __future__ import annotations

import json
import re
from argparse import Action
from collections.abc import Callable, Iterator, Sequence

# maps a link to its replacement; True for links in HTML
Resolve = Callable[[str, bool], str]

_CODE = r"^(?P<indent>[ \t]*)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)[ \t]*$"
_INLINE = r"(?<!`)(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`)"
_LINKS = re.compile(
    rf"(?P<code>{_CODE}|{_INLINE})"
    r"|(?P<before>\]\()(?P<inline>[^)\s]+)"
    r"|(?P<name>^\[[^]\n]+\]:[ ]+)(?P<defined>\S+)"
    r'|(?P<attribute>\b(?:src|srcset|href)=")(?P<html>[^"]+)',
    re.S | re.M,
)
_MARKERS = re.compile(r"<!-- \[\[\[(?:cog.*?\]\]\]|end\]\]\]) -->", re.S)
_ITEM = re.compile(r" *(?P<mark>[*+-]|\d+[.)]) +(?=\S)")


def relinked(text: str, resolve: Resolve) -> str:
    """Replace all links outside code with the result of ``resolve``."""

    def other(found: re.Match[str]) -> str:
        if found["code"]:
            return found["code"]
        if found["html"]:
            return found["attribute"] + resolve(found["html"], True)
        before = found["before"] or found["name"]
        return before + resolve(found["inline"] or found["defined"], False)

    return _LINKS.sub(other, text)


def without_markers(text: str) -> str:
    """Return Markdown without cog markers."""
    return _MARKERS.sub("", text)


def as_site_reads(text: str) -> str:
    """Rewrite GitHub's lists so that Python-Markdown reads them."""
    return "".join(_nested(text))


def _nested(text: str) -> Iterator[str]:
    """Yield lines; indent the contents of a list item four columns more than the item."""
    widths: list[int] = []  # the column at which each open item's text begins
    fence, before, listed = "", "", False
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip(" "))
        if fence:
            fence = "" if line.strip() == fence else fence
        elif line.strip():
            listed = bool(widths)
            while widths and indent < widths[-1] and (_ITEM.match(line) or not before.strip()):
                widths.pop()
            opened = re.match(r" *(```+|~~~+)", line)
            fence = opened[1] if opened else ""
        if not line.strip() or (widths and indent < widths[-1]):  # or a paragraph that continues
            yield line
        else:
            item = None if fence else _ITEM.match(line)
            if item and not listed and before.strip() and item["mark"] in "*+-1.":
                yield "\n"
            shift = indent - (widths[-1] if widths else 0)
            yield " " * (4 * len(widths) + shift) + line[indent:]
            if item:
                widths.append(item.end())
        before = line if not fence else ""


def settings(title: str, actions: Sequence[Action]) -> str:
    """Describe a parser's arguments under a heading, with an anchor for each."""
    parts = [f"## {title}"]
    for action in actions:
        kind = action.metavar or " or ".join(action.choices)
        kind += " ..." if action.nargs == "+" else ""
        default = "" if action.default is None else f", default `{action.default}`"
        text = action.help.replace("%%", "%")
        parts += [f"#### `{action.dest}`", f"`{kind}`{default}. {text[:1].upper()}{text[1:]}"]
    return "\n\n".join(parts)


def notebook(text: str) -> str:
    """Convert a notebook to Markdown: text, code and output."""
    return "\n\n".join(part for cell in json.loads(text)["cells"] for part in _cell(cell))


def _cell(cell: dict) -> Iterator[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell.get("outputs", ()):
        data = output.get("data", {})
        if "image/png" in data:
            image = "".join(data["image/png"]).replace("\n", "")
            yield f'<img alt="Picture drawn by the cell above" src="data:image/png;base64,{image}">'
        elif said := "".join(output.get("text", data.get("text/plain", ""))).rstrip():
            yield f'```text title="Output"\n{said}\n```'
