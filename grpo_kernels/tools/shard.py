"""What a rank holds and sends where the head is sharded over several."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from grpo_kernels.tools.estimate import WIDE, HeadShape
from grpo_kernels.tools.text import count

_ROW_BYTES = 32  # of a row's statistics: logsumexp, entropy and score, and who has the target


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
