"""Numbers in the documents come from measurements, and the measurements are well-formed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import environment as machine
from benchmarks.load import RESULTS, load, load_run
from benchmarks.markers import ROOT, context_for, documents, rewrite, without_marked
from benchmarks.results import REPORT, report
from benchmarks.shapes import DTYPES
from benchmarks.work import WORKS

_NUMBER = r"(?<![\w.])~?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
_WORD = r"\b(?:two|three|four|five|six|seven|eight|nine|ten)"
_UNITS = (
    r"ns|us|µs|ms|s|secs?|seconds?|min|minutes?|h|hours?"
    r"|[KMGT]i?B|bytes?|%|percent|per cent"
    r"|[KMGTP]?FLOPS?|[KMGT]?FLOP/s|[KMGT]i?B/s|(?:tokens?|tok|steps?|it|samples)/s"
)
MEASURED = re.compile(
    "|".join(
        [
            rf"{_NUMBER}\s?(?:{_UNITS})(?![\w/])",
            rf"{_NUMBER}\s?[x\u00d7](?![\w]|\s?\d)",  # a ratio; "2 x 3" is a shape
            rf"(?:{_NUMBER}|{_WORD})\s(?:times|x)\s(?:as|the|faster|slower|less|more|smaller|larger)\b",
            r"\b(?:twice|half)\s(?:as|the)\s(?:fast|slow|time|speed|memory|much memory)\b",
            r"(?<![\w.])\d(?:\.\d+)?e-\d+",  # an error
            r"\|\s*\**\d[\d,]*(?:\.\d+)?\**\s*(?=\|)",  # a cell of a table
        ]
    ),
    re.IGNORECASE,
)
# definitions that look like measurements, each with its reason; one that is not in use fails
ALLOWED: dict[str, str] = {}
RESULT_FILES = sorted(RESULTS.glob("*/????-??-??-*.json"))
relative = lambda path: str(path.relative_to(ROOT))  # noqa: E731


def typed_numbers(document: str) -> list[str]:
    """What looks measured and stands outside of the markers, with its line."""
    found = []
    for index, line in enumerate(without_marked(document).splitlines(), start=1):
        for phrase in ALLOWED:
            line = line.replace(phrase, "")
        found += [f"line {index}: {match[0].strip()}" for match in MEASURED.finditer(line)]
    return found


@pytest.mark.parametrize("path", documents(), ids=relative)
def test_marked_places_hold_what_the_results_give(path: Path) -> None:
    text = path.read_text()
    assert rewrite(text, context_for(path, load()), relative(path)) == text, "run `make results`"


@pytest.mark.parametrize("slug", load())
def test_reports_are_what_the_results_give(slug: str) -> None:
    place = RESULTS / slug
    assert (place / REPORT).read_text() == report(load()[slug], place), "run `make results`"


@pytest.mark.parametrize("path", documents(), ids=relative)
def test_no_measured_number_is_typed_by_hand(path: Path) -> None:
    assert typed_numbers(path.read_text()) == []


@pytest.mark.parametrize("path", documents(), ids=relative)
def test_no_line_of_prose_starts_with_a_marker(path: Path) -> None:
    """Markdown would take the line for HTML."""
    for line in path.read_text().splitlines():
        starts = line.lstrip().startswith("<!-- results:")
        assert not starts or line.rstrip().endswith("-->"), line


def test_every_allowed_phrase_is_in_use() -> None:
    text = "\n".join(path.read_text() for path in documents())
    assert [phrase for phrase in ALLOWED if phrase not in text] == []


@pytest.mark.parametrize(
    "text",
    [
        "It runs at 1.08x the floor.",
        "a ratio of 1.08 x against TRL",
        "2\u00d7 as fast",
        "a step takes 3 ms",
        "after 2.4 s",
        "ran 12 minutes",
        "needs 180 MiB",
        "needs 1,050 MiB",
        "12 % of the time",
        "about 12%.",
        "695 TFLOP/s",
        "4.8 TB/s",
        "1200 tokens/s",
        "3 times faster",
        "three times faster",
        "twice as fast",
        "half the memory",
        "an error of 9e-7",
        "| ours | **1.08** | 180 |",
        "1.89<!-- results: commit cpu -->abc<!-- /results -->x faster",
    ],
)
def test_a_typed_number_is_caught(text: str) -> None:
    assert typed_numbers(f"Some words.\n\n{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "T = 1024 tokens, D = 896, V = 151936, and TRL 1.16",
        "`(tokens, vocabulary)` of sm_90 in fp32 and bf16",
        "at most twice the error of eager PyTorch",
        "mean of sequence sums / (B x max length), arXiv:2402.03300, 2503.14286",
        "It takes <!-- results: median cpu nll small 256 fp32 ours -->3 ms<!-- /results -->.",
        "```\nour loss: 3 ms, 1.08x\n```",
        "| head | 896/151936 | two or three |",
    ],
)
def test_other_numbers_are_free(text: str) -> None:
    assert typed_numbers(f"Some words.\n\n{text}\n") == []


@pytest.mark.parametrize("path", RESULT_FILES, ids=relative)
def test_result_file_is_well_formed(path: Path) -> None:
    run = load_run(path)
    environment = run.environment
    assert environment.device and environment.commit and environment.versions["torch"]
    assert environment.kind in ("cpu", "cuda")
    assert path.parent.name == machine.slug(environment.device)
    assert path.name.startswith(f"{environment.day}-{environment.commit[:12]}")
    assert run.tables or run.training or run.accuracy or run.savings or run.rollouts
    for table in run.tables:
        assert table.work in WORKS and table.dtype in DTYPES
        assert min(table.tokens, table.sequences, table.hidden, table.vocabulary) > 0
        names = [row.provider for row in table.rows]
        assert names and len(names) == len(set(names))
        for row in table.rows:
            assert row.note and all(seconds > 0 for seconds in row.seconds)
            assert row.runs or not row.seconds, "a time beside a reason for having none"
            if row.runs:
                assert all(value < 1 for value in row.errors.values())
