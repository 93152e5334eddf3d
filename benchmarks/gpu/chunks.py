"""A whole loss in chunks of several sizes, and in both schedules."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from benchmarks.gpu.candidates import difference
from benchmarks.gpu.notes import Notes
from benchmarks.gpu.timed import Cost, Stopwatch, rates
from benchmarks.problem import Problem, make_problem
from benchmarks.providers.ours import run_loss
from benchmarks.shapes import MODELS, Case
from benchmarks.work import WORKS

_ROWS = (4096, 8192, 16384, 2048)
_SCHEDULES = ("one_pass", "two_pass")
_TOKENS = (8192, 32768)
_TOLERANCE = 1e-2  # of bf16 gradients whose sums differ in order
_PRODUCTS = 3  # that no schedule can do without


def chunks(notes: Notes, small: bool) -> None:
    """Measure the dapo loss; every result is compared with the one that the library chooses."""
    model, rows = (MODELS["tiny"], (16, 64)) if small else (MODELS["qwen3-1.7b"], _ROWS)
    watch = Stopwatch(notes.device, 1 if small else 5)
    for tokens in (64,) if small else _TOKENS:
        case = Case(model, tokens, "bf16", WORKS["dapo"])
        notes.every([(f"T {tokens}", partial(_sizes, notes, watch, case, rows))])


def _sizes(notes: Notes, watch: Stopwatch, case: Case, sizes: tuple[int, ...]) -> None:
    problem = make_problem(case, notes.device.type)
    want = _outputs(problem, {})
    times: dict[str, float] = {}
    settings: dict[str, dict[str, object]] = {"default": {}}
    for schedule in _SCHEDULES:
        for rows in sizes:
            if rows <= case.tokens:
                size = rows * case.model.vocabulary * 4
                given = {"schedule": schedule, "max_workspace_bytes": size}
                settings[f"{schedule}, {rows} rows"] = given
    notes.every(
        (f"T {case.tokens} {name}", partial(_one, notes, watch, problem, name, given, want, times))
        for name, given in settings.items()
    )
    if times:
        best = min(times, key=lambda name: times[name])
        shown = [
            f"{name} {times[name] * 1e3:.1f} ms" for name in ("default", best) if name in times
        ]
        floor = _cost(case).floor * 1e3
        notes.headline(f"loss T {case.tokens}: {', best '.join(shown)}; floor {floor:.1f} ms")


def _cost(case: Case) -> Cost:
    size = float(case.model.vocabulary * case.model.hidden)
    return Cost(operations=2 * _PRODUCTS * case.tokens * size)


def _outputs(problem: Problem, settings: dict[str, object]) -> dict[str, Tensor]:
    result = run_loss(problem, settings)
    return {name: getattr(result, name) for name in problem.work.outputs}


def _one(
    notes: Notes,
    watch: Stopwatch,
    problem: Problem,
    name: str,
    settings: dict[str, object],
    want: dict[str, Tensor],
    times: dict[str, float],
) -> None:
    what = f"loss T {problem.case.tokens} {name}"
    failure = difference(_outputs(problem, settings), want, _TOLERANCE)
    if notes.check(what, failure is None, "the default's", failure or "that"):
        times[name] = watch.seconds(partial(run_loss, problem, settings))
        notes.number(what, **rates(times[name], _cost(problem.case)))
