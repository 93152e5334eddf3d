"""The head and its loss: ``python -m pytest benchmarks/ --benchmark-only [--full]``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch

from benchmarks import text
from benchmarks.check import against as about  # noqa: F401 (of a case)
from benchmarks.conftest import Session, check_row
from benchmarks.measure import measure as measured
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, REAL, WORKS, Case, make_case
from benchmarks.tables import is_quoted

_HEAD = "qwen3-1.7b"
_CPU = ("logprobs-grad", "nll", "gspo-kl", "dapo-frozen", "dapo-masked", "dapo-zero")
_MOST = ("dapo", "logprobs-entropy", "logprobs-grad", "nll")
_HEADS = (
    *("qwen3-8b", "gemma-2-2b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b"),
    *("gemma-3-4b", "gemma-3-1b"),
)


def _cases(works: Iterable[str], models: Iterable[str], tokens: Iterable[int]) -> list[Case]:
    return [make_case(*each, "bf16") for each in product(works, models, tokens)]


def _cpu() -> list[Case]:
    """Return one real head, most important cases first, then every work at the small head."""
    head = "qwen2.5-0.5b"
    sizes = [("dapo", 1024, True), ("logprobs-entropy", 1024, False)]
    sizes += [("dapo", tokens, False) for tokens in (256, 512)]
    return [
        *(
            make_case(work, head, tokens, dtype, memory=True, slow=slow)
            for work, tokens, slow in sizes
            for dtype in DTYPES
        ),
        *(make_case(work, head, 256, dtype) for work in _CPU for dtype in DTYPES),
        *(make_case("dapo", "smollm2-135m", 1024, dtype, REAL) for dtype in DTYPES),
        *(make_case("dapo", "gemma-3-1b", 1024, dtype, memory=True) for dtype in DTYPES),
        *(make_case(work, "small", 128, dtype) for work in WORKS for dtype in DTYPES),
    ]


def _gpu() -> list[Case]:
    """Return the most important cases, for a machine that is available for minutes."""
    tokens = (1024, 2048, 4096, 16384, 32768, 65536)
    rest = [name for name in WORKS if name not in (*_MOST, "logprobs")]
    return [
        *_cases(["logprobs-entropy"], [_HEAD], [8192]),
        *_cases(["dapo"], ["qwen3-8b"], [8192]),
        # runs for minutes, after two tables are on the disk
        make_case("dapo", _HEAD, 8192, "bf16", slow=True),
        *_cases(["logprobs-grad", "nll"], [_HEAD], [8192]),
        *_cases(["logprobs-entropy"], ["qwen3-8b"], [8192]),
        *_cases(["dapo"], [_HEAD], tokens),
        *_cases(rest, [_HEAD], [8192]),
        *_cases(["dapo"], _HEADS[1:], [8192]),
        *_cases(["logprobs-entropy"], [_HEAD], tokens),
        *_cases(["logprobs-entropy"], _HEADS[1:], [8192]),
    ]


def _gpu_full() -> list[Case]:
    """Return every work and head over all lengths."""
    every = _cases(WORKS, (_HEAD, *_HEADS), (1024, 4096, 16384, 65536))
    every = [replace(case, slow=case.tokens == 4096) for case in every]
    wide = [make_case(work, _HEAD, 4096, "fp32") for work in WORKS]
    # the first entry of a case counts
    return list({str(case): case for case in reversed([*_gpu(), *every, *wide])}.values())[::-1]


# one thorough case; on a CPU, a head that is small and real
_QUICK = (_HEAD, 8192) if torch.cuda.is_available() else ("smollm2-135m", 1024)
CASES = {
    "tiny": [make_case("dapo", "tiny", 32, dtype) for dtype in DTYPES],
    "quick": [make_case("dapo", *_QUICK, dtype, memory=True, slow=True) for dtype in DTYPES],
    "cpu": _cpu(),
    "gpu": _gpu(),
    "gpu-full": _gpu_full(),
}


def notes(case: Case) -> dict[str, str]:
    """Return all providers; the brief suites have only our defaults."""
    brief = any(case is each for name in ("tiny", "quick") for each in CASES[name])
    shown = [name for name in PROVIDERS if is_quoted(name) or not brief]
    return {name: PROVIDERS[name].note for name in shown}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    measured([(PROVIDERS[row.provider], case, row) for row in rows], session.settings(case))
    for row in rows:
        row.cells = {
            "MiB": text.mib(row.extra_bytes),
            "value": text.error(row.worst("loss", "logprobs", "entropy")),
            "grad": text.error(row.worst("dhidden", "dweight")),
        }


test_heads = check_row
