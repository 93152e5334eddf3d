"""Keeps accelerate's process-wide state apart from that of other tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.state import AcceleratorState, GradientState, PartialState

State = dict[type, dict[str, object]]


@contextmanager
def accelerate_state(wanted: State) -> Iterator[State]:
    """Put accelerate's process-wide state aside, so that other tests and ours do not meet.

    Yields the state, filled on exit with what the block left behind.
    """
    owners = (PartialState, AcceleratorState, GradientState)
    before = {owner: dict(owner._shared_state) for owner in owners}
    left: State = {}
    _replace_state({owner: wanted.get(owner, {}) for owner in owners})
    try:
        yield left
    finally:
        left.update({owner: dict(owner._shared_state) for owner in owners})
        _replace_state(before)


def _replace_state(state: State) -> None:
    for owner, values in state.items():
        owner._shared_state.clear()
        owner._shared_state.update(values)
