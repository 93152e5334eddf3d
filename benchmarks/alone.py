"""One provider by itself: ``python -m benchmarks.alone WHAT CASE... PROVIDER ROUNDS``, as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import Any

from benchmarks import accuracy, measure
from benchmarks.problem import make_problem
from benchmarks.providers import EVERY
from benchmarks.shapes import MODELS, Case
from benchmarks.timing import measure_memory
from benchmarks.work import WORKS


def _answer(what: str, case: Case, name: str, rounds: int) -> dict[str, Any]:
    provider = EVERY[name]
    if what == "row":
        return asdict(measure.measure_one(provider, case, "cuda", rounds))
    if what == "accuracy":
        return asdict(accuracy.measure_one(provider, case, "cuda"))
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    provider.run(make_problem(tiny))  # libraries are loaded, threads started
    return measure_memory(provider.run, make_problem(case, exact=False))[0]


def _main(
    what: str, model: str, tokens: str, dtype: str, work: str, inputs: str, name: str, rounds: str
) -> None:
    case = Case(MODELS[model], int(tokens), dtype, WORKS[work], inputs)
    print(json.dumps(_answer(what, case, name, int(rounds))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
