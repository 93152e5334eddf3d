"""Work of the first process that needs the others: they hold parts of the weights it sends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from grpo_trainer.rollout.base import WeightsLostError, WeightSource

_WALK = "walk"  # the first process tells the others: gather the weights with me


class Together:
    """Runs work on the first process, while the others wait for its outcome.

    Args:
        accelerator: knows the processes.
        gathers: whether weights are read by all processes together.
    """

    def __init__(self, accelerator: Accelerator, gathers: bool) -> None:
        self._accelerator = accelerator
        self._gathers = gathers and accelerator.num_processes > 1
        self._weights: WeightSource | None = None
        self._walk: Iterator[tuple[str, Tensor]] = iter(())  # of the first process
        self._thread = 0  # in which the others wait

    def shared(self, weights: WeightSource) -> WeightSource:
        """Return ``weights`` for the first process alone, as often as it likes, within
        :meth:`on_main`."""
        self._weights = weights
        return self._lead if self._gathers else weights

    def on_main(self, work: Callable[[], Any], told: tuple[type[Exception], ...]) -> Any:
        """Return what ``work`` returns on the first process, on all of them; raise what it raises
        on all of them, too, if it is one of ``told``."""
        if self._accelerator.num_processes == 1:
            return work()
        outcome: list[Any] = [None, None]
        if self._accelerator.is_main_process:
            self._thread = threading.get_ident()
            try:
                outcome[0] = work()
            except told as error:
                outcome[1] = error
            self._end_walk()
            broadcast_object_list(outcome)
        else:
            outcome = self._follow()
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def _lead(self) -> Iterator[tuple[str, Tensor]]:
        if threading.get_ident() != self._thread:
            raise WeightsLostError("a sharded policy cannot be sent while it trains")
        self._end_walk()
        broadcast_object_list([_WALK, None])
        assert self._weights is not None  # this was made from them
        self._walk = self._weights()
        return self._walk

    def _end_walk(self) -> None:
        """Go to the end of a walk that was broken off: the others do."""
        for _ in self._walk:
            pass

    def _follow(self) -> list[Any]:
        while True:
            outcome = [None, None]
            broadcast_object_list(outcome)
            if outcome[0] != _WALK:
                return outcome
            assert self._weights is not None  # every process was given them
            for _ in self._weights():
                pass
