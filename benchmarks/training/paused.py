"""A trainer's own ``train()``, one optimisation step at a time."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import TrainerCallback

if TYPE_CHECKING:
    from transformers import Trainer


class StepCost(NamedTuple):
    """The cost of one optimisation step."""

    generate: float  # seconds: rollout and scoring
    train: float  # seconds: the rest, that is forward, backward, optimiser and logging
    memory: int | None  # bytes of the GPU that the rest needed above what was there before


class PausedTraining(TrainerCallback):
    """``trainer.train()``, halted at the start of every optimisation step.

    The call lives on a thread of its own, so that several trainers can take turns while each runs
    its real loop: a second ``train()`` would wrap the model again, and a copy of the loop would
    measure the copy. Only one thread runs at any time.

    ``train()`` must be allowed more steps than will be asked for.

    Raises (in the constructor and in ``step``): whatever ``train()`` raises.
    """

    def __init__(self, trainer: Trainer, device: str) -> None:
        self.trainer = trainer
        self._cuda = device == "cuda"
        self._turn = threading.Barrier(2)  # met at each halt and start; broken at the end
        self._error: BaseException | None = None
        self._generate, self._before = 0.0, 0
        trainer.add_callback(self)
        self._prepare_inputs = trainer._prepare_inputs
        trainer._prepare_inputs = self._timed_inputs  # generates at the first call of a step
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._meet()

    def step(self) -> StepCost:
        """Run to the start of the next step."""
        self._generate = 0.0
        start = self._clock()
        self._meet()
        self._meet()
        seconds = self._clock() - start
        memory = torch.cuda.max_memory_allocated() - self._before if self._cuda else None
        return StepCost(self._generate, seconds - self._generate, memory)

    def close(self) -> None:
        """End ``train()`` where it stands."""
        self._turn.abort()
        self._thread.join()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._turn.wait()
        self._turn.wait()

    def _train(self) -> None:
        try:
            self.trainer.train()
            self._error = RuntimeError("train() ended before the last measured step")
        except BaseException as error:  # raised again where the step was asked for
            self._error = error
        self._turn.abort()

    def _meet(self) -> None:
        try:
            self._turn.wait()
        except threading.BrokenBarrierError:
            error, self._error = self._error, None  # it holds the memory of its stack
            assert error is not None
            raise error from None

    def _timed_inputs(self, inputs: Any) -> Any:
        start, first = self._clock(), self._generate == 0.0
        prepared = self._prepare_inputs(inputs)
        self._generate += self._clock() - start
        if self._cuda and first:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        return prepared

    def _clock(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter()
