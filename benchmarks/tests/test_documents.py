"""Numbers in documents come from measurements: blocks are current, and other text has none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.report import write_documents
from benchmarks.results import ROOT

_NUMBER = r"(?<![\w.])~?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_WORD = r"\b(?:two|three|four|five|six|seven|eight|nine|ten)"
_UNITS = (
    r"ns|us|µs|ms|s|secs?|seconds?|min|minutes?|h|hours?"
    r"|[KMGT]i?B|bytes?|%|percent|per cent"
    r"|[KMGTP]?FLOPS?|[KMGT]?FLOP/s|[KMGT]i?B/s|(?:tokens?|tok|steps?|it|samples)/s"
)
_COMPARED = r"(?:as|the|faster|slower|less|more|smaller|larger)"
MEASURED = re.compile(
    "|".join(
        [
            rf"{_NUMBER}\s?(?:{_UNITS})(?![\w/])",
            rf"{_NUMBER}\s?[x\u00d7](?![\w]|\s?\d)",  # a ratio; "2 x 3" is a shape
            rf"(?:{_NUMBER}|{_WORD})\s(?:times|x)\s{_COMPARED}\b",
            r"\b(?:twice|half)\s(?:as|the)\s(?:fast|slow|time|speed|memory|much memory)\b",
            r"(?<![\w.])\d(?:\.\d+)?e-\d+",  # an error
            r"\|\s*\**\d[\d,]*(?:\.\d+)?\**\s*(?=\|)",  # a cell of a table
        ]
    ),
    re.IGNORECASE,
)
_BLOCK = re.compile(r"<!-- \[\[\[cog.*?\[\[\[end\]\]\] -->|^[ \t]*```.*?^[ \t]*```", re.S | re.M)
_MOST_LINES = 120
DOCUMENTS = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_CAUGHT = """It runs at 1.08x the bare GEMMs.
2\u00d7 as fast
a step takes 3 ms
needs 1,050 MiB
about 12%.
695 TFLOP/s
1200 tokens/s
three times faster
half the memory
an error of 9e-7
| ours | **1.08** | 180 |"""
_FREE = """T = 1024 tokens, D = 896, V = 151936, and TRL 1.16
`(tokens, vocabulary)` of sm_90 in fp32 and bf16
at most twice the error of eager PyTorch
mean of sequence sums / (B x max length), arXiv:2402.03300, 2503.14286
<!-- [[[cog print(1) ]]] -->\n| 1.08 |\n<!-- [[[end]]] -->
```\nour loss: 3 ms, 1.08x\n```
| head | 896/151936 | two or three |"""


def typed_numbers(document: str) -> list[str]:
    """Return typed numbers that look measured, outside of blocks and code, by line."""
    written = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), document)
    return [
        f"line {index}: {match[0].strip()}"
        for index, line in enumerate(written.splitlines(), start=1)
        for match in MEASURED.finditer(line)
    ]


def test_the_first_page_of_numbers_is_short() -> None:
    assert len((ROOT / "benchmarks/README.md").read_text().splitlines()) <= _MOST_LINES


def test_blocks_hold_what_the_results_give(capfd: pytest.CaptureFixture[str]) -> None:
    assert write_documents(check=True) == 0, f"run `make results`: {capfd.readouterr().out}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_measured_number_is_typed_by_hand(path: Path) -> None:
    assert typed_numbers(path.read_text()) == []


def test_a_typed_number_is_caught_and_others_are_free() -> None:
    assert [text for text in _CAUGHT.splitlines() if not typed_numbers(text)] == []
    assert typed_numbers(_FREE) == []
