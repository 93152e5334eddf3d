"""Time of a head's loss, forward and backward: matrix products, and passes over the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from grpo_kernels.logprob.head import logits_dtype
from grpo_kernels.predict.shape import WIDE, HeadShape, Setting
from grpo_kernels.predict.speed import Speed

# Reads and writes of one fp32 element per logit by the row passes of torch. log_softmax reads its
# input twice and writes; its backward is handed zeros that were written, reads them twice and the
# output once, and writes.
_LOG_SOFTMAX = 3 + 5
_ENTROPY = 6  # exp, a product, a sum
# TRL without Triton: every operation on a tile reads its operands and writes a new one.
_TRL_FOLDS = 14 + 23


@dataclass(frozen=True)
class Work:
    """What has to be done, whatever does it."""

    flop: float  # of products in the dtype of the hidden states
    wide_flop: float  # of fp32 products of 16-bit hidden states
    traffic: float  # bytes that passes over the logits read and write

    def seconds(self, speed: Speed) -> float:
        """Products and passes one after the other."""
        products = self.flop / speed.matrix + self.wide_flop / speed.wide_matrix
        return products + self.traffic / speed.bandwidth


def predict_head_work(
    implementation: str, head: HeadShape, tokens: int, *, device: str = "cuda"
) -> Work | None:
    """The work of one forward and backward of all ``tokens``; None without a formula."""
    count = _COUNTS.get(implementation)
    if count is None:
        return None
    passes = count(head, Setting(tokens=tokens, device=device).on_cpu)
    logits = float(tokens) * head.vocabulary
    product = 2.0 * logits * head.hidden
    return Work(passes.products * product, passes.wide * product, passes.traffic * logits)


class _Passes(NamedTuple):
    products: int  # over the head, in the dtype of the hidden states
    wide: int  # in fp32 instead
    traffic: int  # bytes per logit


def _gradients(head: HeadShape) -> int:
    """Products with the gradient of the logits."""
    return 1 if head.frozen else 2


def _converting(head: HeadShape) -> int:
    """Bytes of an element that is read in 16 bits and written in fp32, or back."""
    return head.width + WIDE if head.width < WIDE else 0


def _eager(head: HeadShape, on_cpu: bool, entropy: bool = False) -> _Passes:
    traffic = WIDE * (_LOG_SOFTMAX + entropy * _ENTROPY) + 2 * _converting(head)
    return _Passes(1 + _gradients(head), 0, traffic)


def _trl(head: HeadShape, on_cpu: bool) -> _Passes:
    if not on_cpu:  # logits twice; the kernels read once, then read and write
        return _Passes(2 + _gradients(head), 0, 3 * head.width)
    # the products with the gradient take fp32 copies
    wide = _gradients(head) if head.width < WIDE else 0
    traffic = WIDE * _TRL_FOLDS + 4 * _converting(head)
    return _Passes(2 + _gradients(head) - wide, wide, traffic)


def _ours(head: HeadShape, on_cpu: bool, precision: str = "fp32", forwards: int = 1) -> _Passes:
    kept = logits_dtype(head.dtype, precision).itemsize
    # statistics read the tile, each time it is there; the gradient reads and overwrites it
    traffic = (forwards + 1) * kept + head.width
    # a CPU has no 16-bit product that leaves its fp32 sums
    wide = forwards if on_cpu and kept > head.width else 0
    return _Passes(forwards - wide + _gradients(head), wide, traffic)


_COUNTS: dict[str, Callable[[HeadShape, bool], _Passes]] = {
    "eager": _eager,
    "eager-entropy": partial(_eager, entropy=True),
    "trl": _trl,
    "ours": _ours,
    "ours-input": partial(_ours, precision="input"),
    "ours-two-pass": partial(_ours, forwards=2),
}
