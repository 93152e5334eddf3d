"""Find the cheapest set of changes with which a run fits into a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, combinations

from grpo_kernels.tools.memory import Run, missing
from grpo_kernels.tools.training import training

FULL = training("full")
BF16 = training("bf16")
# the kinds of cost, from cheap to expensive
COSTS = ("time", "rounding", "less is trained", "another GPU")


@dataclass(frozen=True)
class Change:
    """A change to a run that saves memory; ``apply`` returns None if it changes nothing."""

    title: str
    cost: str  # one of COSTS
    apply: Callable[[Run], Run | None]


def _two_passes(run: Run) -> Run | None:
    return replace(run, two_pass=True) if "one_pass" in run.schedules() else None


def _offload(run: Run) -> Run | None:
    return None if run.offload else replace(run, offload=True)


def _tiles(run: Run) -> Run | None:
    if run.tiled or not all(layer.tiled for layer in run.model.layers):
        return None
    return replace(run, tiled=True)


def _eight_bit(run: Run) -> Run | None:
    if run.training != FULL:
        return None
    return replace(run, training=FULL.eight_bit())


def _bf16(run: Run) -> Run | None:
    return replace(run, training=BF16) if run.training == FULL else None


def _lora(run: Run) -> Run | None:
    return replace(run, training=training("lora")) if run.training in (FULL, BF16) else None


def _qlora(run: Run) -> Run | None:
    rank = run.training.rank or 16
    if run.training not in (FULL, BF16, training("lora", rank)):
        return None
    changed = replace(run, training=training("qlora", rank))
    return None if changed.merges_into_rounded else changed


def _sleep(run: Run) -> Run | None:
    engine = run.engine
    if not engine.colocated or engine.sleeps:
        return None
    return replace(run, engine=replace(engine, sleeps=True))


def _fp8_engine(run: Run) -> Run | None:
    engine = run.engine
    if not engine.colocated or engine.weights != "bf16":
        return None
    return replace(run, engine=replace(engine, weights="fp8"))


def _server(run: Run) -> Run | None:
    engine = run.engine
    if not engine.colocated or engine.sleeps or engine.weights != "bf16":
        return None
    return replace(run, engine=replace(engine, place="server", share=None))


CHANGES = (
    Change("two passes at the LM head: one more GEMM", "time", _two_passes),
    Change("hidden states between layers in main memory", "time", _offload),
    Change("MLPs in tiles, recomputed once more", "time", _tiles),
    Change("an engine that sleeps while the policy trains", "time", _sleep),
    Change("8-bit optimizer states", "rounding", _eight_bit),
    Change("bf16 weights, stochastic rounding, 8-bit optimizer states", "rounding", _bf16),
    Change("engine weights in fp8", "rounding", _fp8_engine),
    Change("a LoRA adapter", "less is trained", _lora),
    Change("a LoRA adapter on 4-bit weights (QLoRA)", "less is trained", _qlora),
    Change("the engine on another GPU", "another GPU", _server),
)


@dataclass(frozen=True)
class Answer:
    """A run with the cheapest changes that make it fit, or the closest one if none do."""

    asked: Run
    run: Run
    changes: tuple[Change, ...]

    @cached_property
    def missing(self) -> int:
        """Missing bytes; 0: it fits."""
        return missing(self.run)


def answer(asked: Run) -> Answer:
    """Return the cheapest set of changes with which a run fits.

    Sets are ordered by the number of changes that cost another GPU, then by those that train less,
    that round, and that cost time; ties follow the order of CHANGES. If no set fits, the answer is
    the one that lacks the least memory.
    """
    return min(_answers(asked), key=lambda tried: tried.missing)  # of ties the first


def _answers(asked: Run) -> Iterator[Answer]:
    """Yield the possible sets of changes, the cheapest first, up to the first one that fits."""
    for changes in _sets():
        run: Run | None = asked
        for change in changes:
            run = run and change.apply(run)
        if run is None:
            continue
        tried = Answer(asked, run, changes)
        yield tried
        if not tried.missing:
            return


@cache
def _sets() -> list[tuple[Change, ...]]:
    counts = range(len(CHANGES) + 1)
    sets = chain.from_iterable(combinations(CHANGES, count) for count in counts)
    return sorted(sets, key=_costs)


def _costs(changes: tuple[Change, ...]) -> list[int]:
    """Return how many changes have each cost, the most expensive first."""
    counts = Counter(change.cost for change in changes)
    return [counts[cost] for cost in reversed(COSTS)]
