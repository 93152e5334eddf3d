"""Log-probabilities without a gradient: softmax statistics in the epilogue of the logits GEMM.

See :mod:`linear_stats` for what runs. No logits tile is in memory, only a few sums for each row and
split of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.gpu_tiles import LinearConfig, linear_config, row_stride
from grpo_kernels.backends.triton.common import empty_stats, launching, transform_arguments
from grpo_kernels.backends.triton.linear_stats import linear_stats_kernel
from grpo_kernels.backends.triton.merge import SUMS, merge_splits
from grpo_kernels.head import Head, logits_dtype

_ROUNDED = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
# bound on the sums of the splits; longer batches are launched in chunks
_PARTIAL_BYTES = 32 << 20
_CHUNK_ROWS = 2048  # or a multiple


def linear_stats(
    hidden: Tensor,  # (T, D) bf16 or fp16
    head: Head,  # multiplied in the dtype of ``hidden``
    target: Tensor,  # (T,) int64 in [0, V)
    precision: str,
    extras: bool,
    config: LinearConfig | None = None,  # the table's
) -> RowStats:
    """Return the statistics of every row of a 16-bit head; see :class:`RowStats`."""
    config = config or linear_config(hidden.dtype, head)
    weight = head.weight.to(hidden.dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = head.bias.contiguous() if head.bias is not None else None
    head = Head(weight, bias, head.transform)
    hidden = _packed(hidden)
    logits = logits_dtype(hidden.dtype, precision)
    tile = config.of_one_subtile() if extras else config
    rows = hidden.shape[0]
    stats, target = empty_stats(rows, hidden.device, extras), target.contiguous()
    with launching(config, hidden):
        for chunk in _chunks(rows, triton.cdiv(weight.shape[0], tile.split_columns)):
            its_head, its_stats = head.rows(chunk), stats.rows(chunk)
            _chunk(hidden[chunk], its_head, target[chunk], logits, its_stats, tile)
    return stats


def _packed(hidden: Tensor) -> Tensor:
    """Return the rows without gaps, the first on a 16-byte boundary: which kernel runs on a row
    must not depend on where in memory its batch lies."""
    if hidden.is_contiguous() and hidden.data_ptr() % 16 == 0:
        return hidden
    return hidden.clone(memory_format=torch.contiguous_format)


def _descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [row_stride(x), 1], list(block))


def _chunks(rows: int, splits: int) -> list[slice]:
    """Return ranges of rows whose sums fit into ``_PARTIAL_BYTES``."""
    fitting = _PARTIAL_BYTES // (4 * 3 * splits)
    size = max(1, fitting // _CHUNK_ROWS) * _CHUNK_ROWS
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _chunk(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    logits: torch.dtype,
    stats: RowStats,
    config: LinearConfig,
) -> None:
    """Fill ``stats`` for one range of rows."""
    (rows, depth), columns = hidden.shape, head.weight.shape[0]
    extras = stats.is_top1 is not None
    splits = triton.cdiv(columns, config.split_columns)
    y_target = hidden.new_empty(rows, dtype=torch.float32)
    partials = _partials(splits, rows, hidden.device, extras)
    transform = transform_arguments(head.transform, hidden)
    x, weight = hidden, head.weight
    if config.descriptors:
        x = _descriptor(x, config.block_t, config.block_d)
        weight = _descriptor(weight, config.block_v, config.block_d)
    linear_stats_kernel[(triton.cdiv(rows, config.block_t) * splits,)](
        x_ptr=x,
        weight_ptr=weight,
        bias_ptr=head.bias,
        target_ptr=target,
        y_target_ptr=y_target,
        num_rows=rows,
        num_columns=columns,
        depth=depth,
        stride_wv=row_stride(head.weight),
        num_splits=splits,
        HAS_BIAS=head.bias is not None,
        EXTRAS=extras,
        **partials,
        **transform,
        **constants(config, depth, logits),
    )
    merge_splits(target, y_target, partials, transform, stats)


def _partials(
    splits: int, rows: int, device: torch.device, extras: bool
) -> dict[str, Tensor | None]:
    """Return uninitialised sums by the kernels' names."""
    shape = (splits, rows)
    sums = torch.empty(5 if extras else 3, *shape, device=device).unbind(0)
    best = torch.empty(shape, dtype=torch.int32, device=device) if extras else None
    partials = {f"{name}_ptr": None for name in SUMS} | {"best_ptr": best}
    return partials | {f"{name}_ptr": x for name, x in zip(SUMS, sums, strict=False)}


def constants(config: LinearConfig, depth: int, logits: torch.dtype) -> dict[str, object]:
    """Return the constants that the kernel is specialised on, besides its flags."""
    return {
        "ROUND_TO": _ROUNDED.get(logits),
        "EVEN_D": depth % config.block_d == 0,
        "UPCAST": knobs.runtime.interpret,
        **config.constants,
        **config.options,
    }
