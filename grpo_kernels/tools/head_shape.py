"""The shape of a head, and what a rank holds and sends where it is sharded over several."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from grpo_kernels.tools.text import count

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE = 4  # bytes of an element in fp32
_ROW_BYTES = 32  # of a row's statistics: logsumexp, entropy and score, and who has the target


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """An LM head under hidden states of ``dtype``; its weight may be fp32, as under autocast."""

    hidden: int  # D
    vocabulary: int  # V
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype | None = None  # None: the dtype of the hidden states
    frozen: bool = False  # the weight needs no gradient
    softcap: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)}")
        if self.dtype not in DTYPES.values():
            known = ", ".join(map(str, DTYPES.values()))
            raise ValueError(f"dtype: expected one of {known}; got {self.dtype}")
        if self.weight_dtype not in (None, torch.float32, self.dtype):
            raise ValueError(
                f"weight_dtype: expected torch.float32 or that of the hidden states, "
                f"{self.dtype}; got {self.weight_dtype}"
            )

    @property
    def size(self) -> int:
        """Elements of the weight."""
        return self.vocabulary * self.hidden

    @property
    def weight(self) -> int:
        """Bytes of the weight."""
        return self.size * (self.weight_dtype or self.dtype).itemsize

    @property
    def dweight(self) -> int:
        """Bytes of its gradient."""
        return 0 if self.frozen else self.weight

    @property
    def cast(self) -> int:
        """Bytes of the weight's copy in the dtype of the hidden states, where that is another."""
        return self.size * self.dtype.itemsize if self.weight_dtype not in (None, self.dtype) else 0


@dataclass(frozen=True, kw_only=True)
class Share:
    """What is one rank's of a head."""

    head: HeadShape  # that the rank multiplies with
    of_call: dict[str, Any] = field(default_factory=dict)  # what else a Call of it takes
    by: str | None = None  # how the head is sharded; None: it is not
    ranks: int = 1
    sent_bytes: dict[str, int] = field(default_factory=dict)  # in a call, the least that rings send
    notes: dict[str, str]  # what stands under the table


def whole(head: HeadShape, tokens: int) -> Share:
    """Return the share of the only rank."""
    return Share(head=head, notes={"inputs": "hidden states and head weight"})


def _fsdp(head: HeadShape, tokens: int, ranks: int) -> Share:
    rows = -(-head.vocabulary // ranks)  # the last rank's are padded
    return _gathered("FSDP2", head, ranks, rows * head.hidden, head.weight)


def _zero3(head: HeadShape, tokens: int, ranks: int) -> Share:
    return _gathered("ZeRO-3", head, ranks, -(-head.size // ranks), head.dweight)


def _gathered(by: str, head: HeadShape, ranks: int, elements: int, copied: int) -> Share:
    """Gather the weight before it is used, reduce and scatter its gradient afterwards."""
    sent = {"to gather the weight, in the forward and in the backward": 2 * head.weight}
    if not head.frozen:
        sent["to reduce and scatter its gradient"] = head.dweight
    held = "of the weight" if head.frozen else "of the weight and of its gradient"
    return Share(
        by=by,
        ranks=ranks,
        head=head,
        sent_bytes={what: _by_ring(size, ranks) for what, size in sent.items()},
        notes={
            "shards": f"{held}, which a rank has all the time",
            "inputs": "hidden states and the head weight, gathered",
        },
        of_call={"shards": elements * (head.weight + head.dweight) // head.size, "copied": copied},
    )


def _tensor_parallel(head: HeadShape, tokens: int, ranks: int) -> Share:
    """Give each rank the logits of its ids alone."""
    rows = -(-head.vocabulary // ranks)
    return Share(
        by="tensor parallelism",
        ranks=ranks,
        head=replace(head, vocabulary=rows),
        sent_bytes={
            "of rows' statistics": tokens * _ROW_BYTES * (ranks - 1),
            "to sum the gradient of the hidden states in fp32": 2
            * _by_ring(tokens * head.hidden * WIDE, ranks),
        },
        notes={"inputs": f"hidden states and {rows:,} rows of the head weight"},
        of_call={"sums_dhidden": True},
    )


def _by_ring(size: int, ranks: int) -> int:
    """Return what each rank sends until all have the ``size`` bytes, or one has their sum."""
    return size * (ranks - 1) // ranks


SHARDS = {"fsdp": _fsdp, "zero3": _zero3, "tp": _tensor_parallel}


def read_shard(text: str) -> Callable[[HeadShape, int], Share]:
    """Read an argument such as ``fsdp=8``: it tells the share of a head, for so many tokens."""
    name, _, ranks = text.partition("=")
    if name not in SHARDS:
        known = ", ".join(f"{name}=N" for name in SHARDS)
        raise argparse.ArgumentTypeError(f"expected one of {known}, N ranks; got {text!r}")
    return partial(SHARDS[name], ranks=count(ranks))
