"""The head and its loss: ``python -m pytest benchmarks/ --benchmark-only [--full]``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import text
from benchmarks.conftest import Session
from benchmarks.measure import measure as measured
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, Case, make_case
from benchmarks.tables import is_quoted
from benchmarks.work import WORKS

_HEADS = ("qwen3-8b", "gemma-2-2b", "llama-3.2-1b", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-4b")


def _quick() -> list[Case]:
    """Return one case, thoroughly: on a CPU of a head that is small and real."""
    model, tokens = ("qwen3-1.7b", 8192) if torch.cuda.is_available() else ("smollm2-135m", 1024)
    return [make_case("dapo", model, tokens, dtype, memory=True, slow=True) for dtype in DTYPES]


def _cpu() -> list[Case]:
    """Return one real head, most important cases first, then every work at the small one."""
    head = "qwen2.5-0.5b"
    works = ("logprobs-grad", "nll", "gspo-kl", "dapo-frozen", "dapo-masked", "dapo-zero")
    return [
        *(make_case("dapo", head, 1024, dtype, memory=True, slow=True) for dtype in DTYPES),
        *(make_case("logprobs-entropy", head, 1024, dtype, memory=True) for dtype in DTYPES),
        *(
            make_case("dapo", head, count, dtype, memory=True)
            for count in (256, 512)
            for dtype in DTYPES
        ),
        *(make_case(work, head, 256, dtype) for work in works for dtype in DTYPES),
        *(make_case(work, "small", 128, dtype) for work in WORKS for dtype in DTYPES),
    ]


def _gpu() -> list[Case]:
    """Return the most important cases, for a machine that is there for minutes."""
    head = "qwen3-1.7b"
    tokens = (1024, 2048, 4096, 16384, 32768, 65536)
    first = ("dapo", "logprobs-entropy", "logprobs-grad", "nll")
    rest = [name for name in WORKS if name not in (*first, "logprobs")]
    return [
        make_case("logprobs-entropy", head, 8192, "bf16"),
        make_case("dapo", "qwen3-8b", 8192, "bf16"),
        # takes minutes, so two tables are safe by then
        make_case("dapo", head, 8192, "bf16", slow=True),
        make_case("logprobs-grad", head, 8192, "bf16"),
        make_case("nll", head, 8192, "bf16"),
        make_case("logprobs-entropy", "qwen3-8b", 8192, "bf16"),
        *(make_case("dapo", head, count, "bf16") for count in tokens),
        *(make_case(work, head, 8192, "bf16") for work in rest),
        *(make_case("dapo", name, 8192, "bf16") for name in _HEADS[1:]),
        *(make_case("logprobs-entropy", head, count, "bf16") for count in tokens),
        *(make_case("logprobs-entropy", name, 8192, "bf16") for name in _HEADS[1:]),
    ]


def _gpu_full() -> list[Case]:
    """Return every work and head over all lengths."""
    tokens = (1024, 4096, 16384, 65536)
    every = [
        make_case(work, model, count, "bf16", slow=count == 4096)
        for work in WORKS
        for model in ("qwen3-1.7b", *_HEADS)
        for count in tokens
    ]
    wide = [make_case(work, "qwen3-1.7b", 4096, "fp32") for work in WORKS]
    # the first entry of a case counts
    return list({str(each): each for each in reversed([*_gpu(), *every, *wide])}.values())[::-1]


CASES = {
    "tiny": [make_case("dapo", "tiny", 32, dtype) for dtype in DTYPES],
    "quick": _quick(),
    "cpu": _cpu(),
    "gpu": _gpu(),
    "gpu-full": _gpu_full(),
}


def names(case: Case) -> list[str]:
    """Return everybody; in the brief suites of ours the defaults."""
    brief = any(case is each for name in ("tiny", "quick") for each in CASES[name])
    return [name for name in PROVIDERS if is_quoted(name) or not brief]


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    rows = measured([(PROVIDERS[name], case) for name in names], session.settings(case))
    for row in rows:
        row.cells = {
            "MiB": text.mib(row.info.get("extra_bytes")),
            "value": text.error(row.worst("loss", "logprobs", "entropy")),
            "grad": text.error(row.worst("dhidden", "dweight")),
        }
    return rows


def test_heads(row: Row) -> None:
    """Time the head and its loss."""
    assert row.seconds
