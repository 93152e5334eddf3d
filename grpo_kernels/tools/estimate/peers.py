"""Memory of eager full logits and of TRL's chunked head."""

from __future__ import annotations

import torch

from grpo_kernels.tools.estimate.shape import WIDE, HeadShape, Moment, Setting, library_bytes

# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS = 4096
_TRL_COLUMNS = 32768


def eager(head: HeadShape, setting: Setting, entropy: bool = False) -> list[Moment]:
    """``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, and autograd.

    ``entropy``: the entropies are computed, too, without a gradient.
    """
    logits = setting.tokens * head.vocabulary * head.width
    wide = setting.tokens * head.vocabulary * WIDE
    dhidden = setting.tokens * head.hidden * head.width
    dweight = head.trained * head.width
    copy = head.size * head.width if head.mixed else 0  # autocast keeps its copy to the end
    base = copy + library_bytes(setting, fp32_products=head.width == WIDE)
    capped = base + (logits if head.softcap else 0)  # tanh is saved for the backward
    # only CUDA's fp16 kernel reads 16-bit logits and writes fp32 ones, and back
    fused = head.dtype == torch.float16 and not setting.on_cpu
    converted = 0 if fused or head.width == WIDE else wide
    dlogits = logits if fused else wide
    moments = [
        # logits, their fp32 copy, their log-softmax
        Moment("forward of log_softmax, (T, V) logits", capped + logits + converted + wide),
        # the log-softmax, its gradient (zeros but for the targets), the gradient of its input
        Moment("backward of log_softmax, three of (T, V)", capped + 2 * wide + dlogits),
        # the gradient of the logits and both products with it
        Moment("the gradient of (T, V) logits and its products", base + logits + dweight + dhidden),
        # the weight's gradient in both dtypes
        Moment(
            "the weight's gradient in two dtypes",
            copy + dweight + dhidden + head.mixed * head.trained * WIDE,
        ),
    ]
    if entropy:
        # logits, their log-softmax, the probabilities, and the product of these two
        moments.append(Moment("entropies of (T, V) logits", capped + logits + 3 * wide))
    return moments


def trl(head: HeadShape, setting: Setting) -> list[Moment]:
    """The backward of ``ChunkedLogProbFunction``: its forward holds the tile alone.

    Both gradients are fp32 sums over tiles of (4096, 32768) logits in the input dtype.
    """
    rows, columns = min(setting.tokens, _TRL_ROWS), min(head.vocabulary, _TRL_COLUMNS)
    hidden = setting.tokens * head.hidden
    several = setting.tokens > rows or head.vocabulary > columns
    # of the weight, cast: the piece in use, and the one before it while this one is made
    piece = head.mixed * (1 + several) * columns * head.hidden * head.width
    sums = (hidden + head.trained) * WIDE
    library = library_bytes(setting, fp32_products=True)
    base = sums + rows * _TRL_COLUMNS * head.width + piece + library
    moments = [
        # the sums, the tile
        Moment("both gradients and a tile", base),
        # the sums, the last tile, and the sums in the dtype of the inputs where that is another
        Moment(
            "both gradients in fp32 and rounded",
            base + hidden * _below_fp32(head.width) + head.trained * _below_fp32(head.weight_width),
        ),
    ]
    if not setting.on_cpu:
        return moments
    tile = rows * columns * WIDE
    # scaled and tempered scores, log p, p, the gradient, (a flag,) the indicator, minus p;
    # with a softcap its tanh, too
    fold = tile * (7 + head.softcap) + rows * columns
    # fp32 copies of a 16-bit tile and of its other factor: a piece of the weight, or the rows
    factor = max(columns, rows) * head.hidden * WIDE
    upcast = tile + factor if head.width < WIDE else 0
    return [
        *moments,
        Moment("both gradients and the temporaries of a tile", base + fold),
        Moment("both gradients and fp32 copies of a tile", base + upcast),
    ]


def _below_fp32(width: int) -> int:
    """Bytes of an element that is rounded from fp32; none where nothing is."""
    return width if width < WIDE else 0
