"""Time of a head's loss, forward and backward: matrix products, and passes over the logits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from grpo_kernels.tools.estimate import our_work
from grpo_kernels.tools.estimate.our_work import product
from grpo_kernels.tools.estimate.shape import WIDE, HeadShape, Setting
from grpo_kernels.tools.estimate.work import Work

# Reads and writes of one fp32 element per logit by the row passes of torch. log_softmax reads its
# input twice and writes; its backward is handed zeros that were written, reads them twice and the
# output once, and writes.
_LOG_SOFTMAX = 3 + 5
_ENTROPY = 6  # exp, a product, a sum
# TRL without Triton: every operation on a tile reads its operands and writes a new one.
_TRL_FOLDS = 14 + 23


def predict_head_work(
    implementation: str,
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    max_workspace_bytes: int | None = None,
) -> Work | None:
    """The work of one forward and backward of all ``tokens``; None without a formula."""
    count = _COUNTS.get(implementation)
    if count is None:
        return None
    return count(
        head, Setting(tokens=tokens, device=device, max_workspace_bytes=max_workspace_bytes)
    )


def _gradients(head: HeadShape) -> int:
    """Products with the gradient of the logits."""
    return 1 if head.frozen else 2


def _converting(head: HeadShape) -> int:
    """Bytes of an element that is read in 16 bits and written in fp32, or back."""
    return head.width + WIDE if head.width < WIDE else 0


def _eager(head: HeadShape, setting: Setting, entropy: bool = False) -> Work:
    traffic = WIDE * (_LOG_SOFTMAX + entropy * _ENTROPY) + 2 * _converting(head)
    return _total(head, setting, 1 + _gradients(head), 0, traffic)


def _trl(head: HeadShape, setting: Setting) -> Work:
    if not setting.on_cpu:  # logits twice; the kernels read once, then read and write
        return _total(head, setting, 2 + _gradients(head), 0, 3 * head.width)
    # the products with the gradient take fp32 copies
    wide = _gradients(head) if head.width < WIDE else 0
    traffic = WIDE * _TRL_FOLDS + 4 * _converting(head)
    return _total(head, setting, 2 + _gradients(head) - wide, wide, traffic)


def _total(head: HeadShape, setting: Setting, products: int, wide: int, traffic: int) -> Work:
    """So many products, ``wide`` of them in fp32, and passes of ``traffic`` bytes per logit."""
    work = Work(traffic=float(traffic) * setting.tokens * head.vocabulary)
    for kind in ["flop"] * products + ["wide_flop"] * wide:
        work += product(kind, head, setting.tokens)
    return work


_COUNTS: dict[str, Callable[[HeadShape, Setting], Work]] = {
    "eager": _eager,
    "eager-entropy": partial(_eager, entropy=True),
    "trl": _trl,
    "ours": our_work.one_pass,
    "ours-input": partial(our_work.one_pass, precision="input"),
    "ours-two-pass": our_work.two_pass,
}
