"""Leaves rows without a gradient out of the GEMMs, by moving rows from the end into their place."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.engine.rows import ranges

# Moving a row reads and writes V values; in the two GEMMs a row costs 4 D V operations. So any move
# pays, but a GEMM over a few rows less is not always faster, and a move costs the host a few
# operations.
LEAST_SHARE = 1 / 16
FEWEST = 16
_MULTIPLE = 256  # rows of a GPU's GEMM tiles
_BLOCK = 256  # rows that move at a time, through a copy


def moved_forward_(values: Tensor, nonzero: Tensor) -> Tensor | None:
    """Move the ``nonzero`` rows (T,) of values (T, V) to the front, in place; the host waits once.

    Return the original index of each of the first rows: all nonzero rows, filled up with others to
    a multiple of 256. Return None if too few rows are zero; then nothing moves. Rows are copied, so
    repeating the call changes nothing more.
    """
    rows = len(nonzero)
    count = nonzero.sum()
    length = ((count + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE).clamp(max=rows)
    place = torch.arange(rows, device=nonzero.device)
    behind = (nonzero & (place >= length)).sum()
    counts = host.sync_to_host(torch.stack([count, length, behind]))
    total, end, moves = host.values(counts)
    if rows - end < max(FEWEST, rows * LEAST_SHARE):
        return None
    order = torch.argsort(~nonzero, stable=True)
    source = order[total - moves : total]
    gap = order[total : total + moves]
    values = values.data  # autograd's version counter would make a second backward an error
    for part in ranges(moves, _BLOCK):
        values.index_copy_(0, gap[part], values.index_select(0, source[part]))
    return place[:end].index_copy(0, gap, source)
