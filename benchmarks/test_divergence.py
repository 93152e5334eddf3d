"""The divergence of a head from a teacher's head, with gradients, next to other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from benchmarks import text
from benchmarks.check import against as about  # noqa: F401 (of a case)
from benchmarks.conftest import Session, check_row
from benchmarks.measure import error_cells
from benchmarks.measure import measure as measured
from benchmarks.problem import DIVERGENCES, with_teacher
from benchmarks.providers import PROVIDERS
from benchmarks.results import Row
from benchmarks.shapes import MODELS, Case, Work
from benchmarks.tables import BARE

NOTES = {
    BARE: "only the products: two for the logits and two for the gradients, by torch",
    "ours": "linear_divergence",
    "eager": "full logits of both heads, with autograd",
    "trl": "ChunkedDivergenceFunction of TRL's DistillationTrainer",
    "liger": "LigerFusedLinearJSDLoss, not compiled",
}


def _case(kind: str, model: str, tokens: int, depth: int, dtype: str, memory: bool = False) -> Case:
    return Case(
        model=MODELS[model],
        tokens=tokens,
        dtype=dtype,
        work=Work(kind, f"{kind} from a teacher, forward + backward", "divergence"),
        memory=memory,
        title=f"teacher of {depth}",
        change=partial(with_teacher, depth),
    )


_CPU = [
    _case(kind, "qwen2.5-0.5b", 1024, 896, "fp32", kind == "forward_kl") for kind in DIVERGENCES
]
_GPU = [_case(kind, "qwen3-1.7b", 8192, 4096, "bf16", memory=True) for kind in DIVERGENCES]
CASES = {
    "tiny": [_case(kind, "tiny", 32, 48, "fp32") for kind in DIVERGENCES],
    "cpu": [*_CPU, replace(_CPU[0], dtype="bf16", memory=False)],
    "gpu": _GPU[:1],
    "gpu-full": _GPU,
}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    calls = [(PROVIDERS[row.provider], case, row) for row in rows]
    settings = replace(session.settings(case, bits=False), rounds=session.rounds(3))
    measured(calls, settings)
    for row in rows:
        row.cells = error_cells(row) | {"loss": text.error(row.errors.get("loss"))}


test_divergence = check_row
