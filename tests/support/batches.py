"""What a trainer computes its loss of."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_trainer import GRPOTrainer
from grpo_trainer.data import MicroBatch


class BatchTrainer(GRPOTrainer):
    """A trainer with the micro-batches of its steps, ``batches``, and of its evaluations."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self.batches: list[MicroBatch] = []
        super().__init__(*args, **named)

    def compute_loss(self, model: Any, inputs: MicroBatch, *args: Any, **named: Any) -> Tensor:
        self.batches.append(inputs)
        return super().compute_loss(model, inputs, *args, **named)
