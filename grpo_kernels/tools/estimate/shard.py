"""What a rank holds and sends where the head is sharded over several."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_kernels.tools.estimate.call import WIDE, HeadShape
from grpo_kernels.tools.estimate.memory import MemoryEstimate
from grpo_kernels.tools.text import count

_ROW_BYTES = 32  # of a row's statistics: logsumexp, entropy and score, and who has the target


@dataclass(frozen=True)
class Shard:
    """One of equal parts of a head of the shape that each method gets."""

    ranks: int

    title: ClassVar[str]
    whole_rows: ClassVar[bool] = True  # a rank forms the logits of all ids

    def head(self, whole: HeadShape) -> HeadShape:
        """Return the head that a rank multiplies with."""
        return whole

    def add(self, estimate: MemoryEstimate, whole: HeadShape) -> MemoryEstimate:
        """Return an estimate of that head, with what the shards add to it."""
        return estimate

    def sent(self, whole: HeadShape, tokens: int) -> dict[str, int]:
        """Return the bytes that a rank sends in a call, at the least that rings send."""
        raise NotImplementedError

    def notes(self, whole: HeadShape) -> dict[str, str]:
        """Return what stands under the table."""
        raise NotImplementedError

    def _gathered(self, size: int) -> int:
        """Return what each rank sends until all have the ``size`` bytes, or one has their sum."""
        return size * (self.ranks - 1) // self.ranks


@dataclass(frozen=True)
class Gathered(Shard):
    """The weight is gathered before it is used, its gradient reduced and scattered afterwards."""

    def add(self, estimate: MemoryEstimate, whole: HeadShape) -> MemoryEstimate:
        # a collective's flat buffer is there while the logits are not
        extra = max(estimate.extra, self._copied(whole))
        shards = self._shard(whole, whole.size) + self._shard(whole, whole.trained)
        return replace(estimate, extra=extra, shards=shards)

    def sent(self, whole: HeadShape, tokens: int) -> dict[str, int]:
        weight, gradient = (n * whole.weight_width for n in (whole.size, whole.trained))
        gathers = {"to gather the weight, in the forward and in the backward": 2 * weight}
        reduces = {"to reduce and scatter its gradient": gradient} if gradient else {}
        return {what: self._gathered(size) for what, size in (gathers | reduces).items()}

    def notes(self, whole: HeadShape) -> dict[str, str]:
        both = "of the weight" if whole.frozen else "of the weight and of its gradient"
        return {
            "shards": f"{both}, which a rank has all the time",
            "inputs": "hidden states and the head weight, gathered",
        }

    def _shard(self, whole: HeadShape, elements: int) -> int:
        return -(-elements // self.ranks) * whole.weight_width

    def _copied(self, whole: HeadShape) -> int:
        """Return the bytes of what is copied for a collective."""
        raise NotImplementedError


class Fsdp(Gathered):
    title = "FSDP2"

    def _shard(self, whole: HeadShape, elements: int) -> int:
        rows = -(-whole.vocabulary // self.ranks)  # the last rank's are padded
        return rows * whole.hidden * whole.weight_width if elements else 0

    def _copied(self, whole: HeadShape) -> int:
        return whole.size * whole.weight_width


class Zero3(Gathered):
    title = "ZeRO-3"

    def _copied(self, whole: HeadShape) -> int:
        return whole.trained * whole.weight_width


class TensorParallel(Shard):
    """Each rank has the logits of its ids alone."""

    title = "tensor parallelism"
    whole_rows = False

    def head(self, whole: HeadShape) -> HeadShape:
        return replace(whole, vocabulary=-(-whole.vocabulary // self.ranks))

    def sent(self, whole: HeadShape, tokens: int) -> dict[str, int]:
        dhidden = tokens * whole.hidden * WIDE
        return {
            "of rows' statistics": tokens * _ROW_BYTES * (self.ranks - 1),
            "to sum the gradient of the hidden states in fp32": 2 * self._gathered(dhidden),
        }

    def notes(self, whole: HeadShape) -> dict[str, str]:
        rows = self.head(whole).vocabulary
        return {"inputs": f"hidden states and {rows:,} rows of the head weight"}


SHARDS: dict[str, type[Shard]] = {"fsdp": Fsdp, "zero3": Zero3, "tp": TensorParallel}


def read_shard(text: str) -> Shard:
    """Read an argument such as ``fsdp=8``."""
    name, _, ranks = text.partition("=")
    if name not in SHARDS:
        known = ", ".join(f"{name}=N" for name in SHARDS)
        raise argparse.ArgumentTypeError(f"expected one of {known}, N ranks; got {text!r}")
    return SHARDS[name](count(ranks))
