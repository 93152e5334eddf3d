"""The smallest set of changes with which a run fits into a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations

from grpo_kernels.tools.memory import Run, missing
from grpo_kernels.tools.training import training

# what a change costs, from cheap to dear
COSTS = ("time", "rounding", "less is trained", "another GPU")


@dataclass(frozen=True)
class Change:
    """A change of a run that saves memory; ``apply`` returns None where it is none."""

    title: str
    cost: str  # of COSTS
    apply: Callable[[Run], Run | None]


def _two_passes(run: Run) -> Run | None:
    return replace(run, two_pass=True) if "one_pass" in run.schedules() else None


def _offload(run: Run) -> Run | None:
    return None if run.offload else replace(run, offload=True)


def _tiles(run: Run) -> Run | None:
    can = all(layer.tiled for layer in run.model.layers)
    return replace(run, tiled=True) if can and not run.tiled else None


def _sleep(run: Run) -> Run | None:
    engine = run.engine
    can = engine.colocated and not engine.sleeps
    return replace(run, engine=replace(engine, sleeps=True)) if can else None


def _eight_bit(run: Run) -> Run | None:
    full = run.training == training("full")
    return replace(run, training=run.training.eight_bit()) if full else None


def _bf16(run: Run) -> Run | None:
    return replace(run, training=training("bf16")) if run.training == training("full") else None


def _fp8_engine(run: Run) -> Run | None:
    engine = run.engine
    can = engine.colocated and engine.weights == "bf16"
    return replace(run, engine=replace(engine, weights="fp8")) if can else None


def _lora(run: Run) -> Run | None:
    whole = run.training in (training("full"), training("bf16"))
    return replace(run, training=training("lora")) if whole else None


def _qlora(run: Run) -> Run | None:
    way, rank = run.training, run.training.rank or 16
    plain = way in (training("full"), training("bf16"), training("lora", rank))
    changed = replace(run, training=training("qlora", rank))
    return changed if plain and not changed.merges_into_rounded else None


def _server(run: Run) -> Run | None:
    engine = run.engine
    can = engine.colocated and not engine.sleeps and engine.weights == "bf16"
    moved = replace(engine, place="server", share=None)
    return replace(run, engine=moved) if can else None


CHANGES = (
    Change("two passes at the LM head: one more product", "time", _two_passes),
    Change("hidden states between layers in main memory", "time", _offload),
    Change("MLPs in tiles, computed once more", "time", _tiles),
    Change("an engine that sleeps while the policy trains", "time", _sleep),
    Change("optimizer states of 8 bits", "rounding", _eight_bit),
    Change("bf16 weights, stochastic rounding, states of 8 bits", "rounding", _bf16),
    Change("engine weights in fp8", "rounding", _fp8_engine),
    Change("a LoRA adapter", "less is trained", _lora),
    Change("a LoRA adapter on weights of 4 bits (QLoRA)", "less is trained", _qlora),
    Change("the engine on another GPU", "another GPU", _server),
)


@dataclass(frozen=True)
class Answer:
    """A run, changed as little as it takes to fit; or the nearest one, where none fits."""

    asked: Run
    run: Run
    changes: tuple[Change, ...]

    @property
    def missing(self) -> int:
        """Bytes that the run lacks; 0: it fits."""
        return missing(self.run)


def answer(asked: Run) -> Answer:
    """Return the cheapest set of changes with which a run fits.

    Sets are tried by how many of their changes cost another GPU, then by how many train less, then
    by how many round, then by how many cost time; among equals the order is that of CHANGES. Where
    no set fits, it is the one that lacks the least memory.
    """
    best: Answer | None = None
    for changes in _sets():
        run: Run | None = asked
        for change in changes:
            run = run and change.apply(run)
        if run is None:
            continue
        tried = Answer(asked, run, changes)
        if not tried.missing:
            return tried
        if best is None or tried.missing < best.missing:
            best = tried
    assert best is not None  # no changes are a set, too
    return best


@cache
def _sets() -> tuple[tuple[Change, ...], ...]:
    return tuple(sorted(_subsets(), key=_dearness))


def _subsets() -> Iterator[tuple[Change, ...]]:
    for count in range(len(CHANGES) + 1):
        yield from combinations(CHANGES, count)


def _dearness(changes: tuple[Change, ...]) -> list[int]:
    counts = Counter(change.cost for change in changes)
    return [counts[cost] for cost in reversed(COSTS)]  # sorting keeps the order of equals
