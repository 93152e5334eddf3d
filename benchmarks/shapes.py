"""The shapes that are measured, by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Full sequences of one length, before a linear head."""

    name: str
    sequences: int
    length: int
    hidden: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    def __str__(self) -> str:
        return (
            f"{self.name}: T={self.tokens} ({self.sequences} x {self.length}), "
            f"D={self.hidden}, V={self.vocabulary}"
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("tiny", 3, 8, 32, 257),
        Shape("small", 4, 64, 256, 32000),
        Shape("qwen2.5-0.5b", 4, 256, 896, 151936),
    )
}
QUICK = ("small",)  # what the pytest suite measures without --full
FULL = ("small", "qwen2.5-0.5b")
