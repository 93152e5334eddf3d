"""Text that people read: the words of documents, and the comments and strings of code."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS = [
    *GUIDES,
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
CODE = [
    path
    for folder in ("grpo_kernels", "grpo_trainer", "benchmarks", "csrc", "docs")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".cpp", ".h", ".inc")
]
_GENERATED = re.compile(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|<!-- help: .*? -->", re.S)
_FENCED = re.compile(r"^[ \t]*```.*?^[ \t]*```", re.S | re.M)
_TEXT = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}

# What a reader of American English stumbles over, and what to write instead.
OLD_STYLE = {
    r"\b(?:this page says|with this page)\b": "start with the verb",
    r"\bone's own\b": "your own",
    r"\bof (?:your|our|my|his|her|its|their) own\b": "your own X, its own X",
    r"\bof (?:yours|ours|theirs)\b": "your X, our X",
    r"(?<!\")(?<!matmuls )\balone\b(?!\")": "only; by itself",
    r"\bbesides?\b": "next to; in addition to",
    r"\b(?:anew|likewise|kin|mend(?:s|ed)?|lean(?:er|est))\b": "again; also; family; fix; smaller",
    r"(?<!connection )(?<!connections )\brefus(?:e|es|ed|al|als|ing)\b": "is an error; raises",
    r"\bsa(?:y|ys|id) so\b": "report it; name what is said",
    r"\bin the mean\b": "on average",
    r"\bgo(?:es|ing|ne)? on\b": "continue",
    r"\bbut for\b": "except",
    r"\b(?:stands|stood)\b|\bstand\b(?!-)": "is; are",
    r"\b(?:nobody|everybody|somebody)\b": "no one; all; name who",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\b(?:is|are|was|were|be|been) told\b": "set; pass; get",
    r"\bmade of\b": "built from; consists of",
    r"\b(?:is|are|was|were|be) held to\b": "is tested against; must match",
    r"\b(?:thereby|whereby|wherein|therein|thereof|hence|thus|whence)\b": "so",
    r"\b(?:the like|and such)\b": "name the things",
    r"\binside of\b": "inside; in",
    r"\bwithout a word\b": "silently",
    r"\b(?:is no such|of no use|no such thing)\b": "name the fact",
    r"\b(?:wanted|asked for)\b": "requested",
    r"\bto the bit\b": "bit for bit",
    r"\b(?:re|un|de)?(?:normal|optim|material|initial|serial|real|recogn|minim|maxim|summar|organ"
    r"|general|synchron|vector|quant|penal|factor|linear|token|special|parallel|util|final"
    r"|regular|random|standard|custom|priorit|author)is(?:e|es|ed|er|ers|ing|ation)\b": "-ize",
    r"\b(?:behaviour|colour|favour|neighbour|honour|labell|modell|travell|centre|catalogue)": (
        "behavior, color, labeled, center"
    ),
}
# What is good English in small doses: the most a thousand words may have.
_FREQUENT = {
    "whose": r"\bwhose\b",
    "that of": r"\b(?:that|those) of\b",
    "what is": r"\b[Ww]hat (?:is|are|was|has|have|does|it|they|a|the)\b",
    "takes": r"\b[Tt]akes?\b",
    "Where ...,": r"(?:^|[.:;] |\| |\* )Where [^#|?\n]*,",
    "Of ...": r"(?:^|[.:;] |\| |\* )Of (?!course)",
}
FREQUENT = {name: re.compile(pattern, re.M) for name, pattern in _FREQUENT.items()}


def prose(document: str) -> str:
    """Return a document without blocks of code and blocks that are generated."""
    return _FENCED.sub(" ", _GENERATED.sub(" ", document))


def words(path: Path) -> int:
    """Count the words of a document's prose, without HTML tags and the bars of tables."""
    text = re.sub(r"<[^>]+>", "", prose(path.read_text()))
    return len(re.findall(r"\S*\w\S*", text))


def old_style(text: str) -> Iterator[str]:
    """Yield each phrase of the old style with its line, and what to write instead."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern, better in OLD_STYLE.items():
            for match in re.finditer(pattern, line, re.I):
                yield f"line {number}: {match[0]!r} (better: {better})"


def readable(path: Path) -> str:
    """Return what people read of a file, each line at its place."""
    source = path.read_text()
    if path.suffix == ".md":
        text = _FENCED.sub(_blank, _GENERATED.sub(_blank, source))
        return re.sub(r"`[^`\n]*`|\]\([^)\n]*\)", "``", text)
    if path.suffix == ".py":
        return _python(source)
    return "\n".join(line.partition("//")[2] for line in source.splitlines())


def _blank(match: re.Match[str]) -> str:
    """Return as many empty lines as a block has, so line numbers stay."""
    return "\n" * match[0].count("\n")


def _python(source: str) -> str:
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in _TEXT:
            for offset, line in enumerate(token.string.splitlines()):
                lines[token.start[0] - 1 + offset] += f" {line}"
    return "\n".join(lines)
