"""Work of a head's loss, counted in units whose cost a device's speed gives."""

from __future__ import annotations

from dataclasses import dataclass, fields

from grpo_kernels.tools.estimate.speed import Speed

# field of Work -> field of Speed
RATES = {
    "flop": "matrix",
    "sums_flop": "sums",
    "fused_flop": "fused",
    "wide_flop": "wide_matrix",
    "traffic": "bandwidth",
    "adding": "adding",
}  # units per second
DURATIONS = {"pieces": "piece", "calls": "call"}  # seconds per unit


@dataclass(frozen=True, kw_only=True)
class Work:
    """What has to be done, whatever does it."""

    flop: float = 0.0  # of products in the dtype of the hidden states
    sums_flop: float = 0.0  # of products of 16-bit factors that leave their fp32 sums
    fused_flop: float = 0.0  # of the product that takes its statistics along
    wide_flop: float = 0.0  # of fp32 products of 16-bit hidden states
    traffic: float = 0.0  # bytes read and written: passes over the logits, the weight of a product
    adding: float = 0.0  # bytes of fp32 sums that are read and written between products
    pieces: int = 0  # chunks of rows, slices of the vocabulary
    calls: int = 0

    def __add__(self, other: Work) -> Work:
        names = (field.name for field in fields(self))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def all_flop(self) -> float:
        """Of every product, whatever its dtypes."""
        return self.flop + self.sums_flop + self.fused_flop + self.wide_flop

    def seconds(self, speed: Speed) -> float:
        """All of it one after the other."""
        by_rate = sum(getattr(self, a) / speed.rate(b) for a, b in RATES.items())
        return by_rate + sum(getattr(self, a) * getattr(speed, b) for a, b in DURATIONS.items())
