"""The micro-batches of the current generation batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo_kernels import SamplingMask
from grpo_trainer.data.microbatch import MicroBatch


class RolloutBuffer:
    """Gives out a generation batch's micro-batches in turn, and asks for the next when it is used.

    Args:
        slices: micro-batches of a generation batch.
        iterations: how often each is used.
    """

    def __init__(self, slices: int, iterations: int) -> None:
        self._slices = slices
        self._uses = slices * iterations
        self.position = 0  # micro-steps taken
        self.batches: list[MicroBatch] = []

    def current(self, make: Callable[[], list[MicroBatch]]) -> MicroBatch:
        """The micro-batch of this micro-step."""
        if not self.batches or self.position % self._uses == 0:
            self.batches = make()
        return self.batches[self.position % self._slices]

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "batches": [asdict(batch) for batch in self.batches]}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.batches = [_batch(**fields) for fields in state["batches"]]


def _batch(sampling_mask: dict[str, Any] | None = None, **fields: Any) -> MicroBatch:
    if sampling_mask is not None:
        fields["sampling_mask"] = SamplingMask.from_csr(
            sampling_mask["indices"], sampling_mask["offsets"]
        )
    return MicroBatch(**fields)
