"""Rows without a gradient leave the products: rows from the end move into their gaps."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.engine.rows import ranges

# A row that moves is read and written once, V values each; in the two GEMMs it would have cost
# 4 D V operations. So any move pays, but a GEMM over a few rows less is not always faster, and a
# move costs the host a few operations.
LEAST_SHARE = 1 / 16
FEWEST = 16
_MULTIPLE = 256  # of rows, by which a GPU's products are cut
_BLOCK = 256  # rows that move at a time: there is a copy of them


def moved_forward_(values: Tensor, nonzero: Tensor) -> Tensor | None:
    """Move the ``nonzero`` rows (T,) of values (T, V) to the front, in place; the host waits once.

    Return the index of the row that each of the first rows holds afterwards. These are all nonzero
    rows, filled up with others to a multiple of 256. None: too few rows are zero, and nothing
    moved. A row that moves is copied, so repeating the call changes nothing more.
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
    values = values.data  # autograd's counter of changes would refuse a second backward
    for part in ranges(moves, _BLOCK):
        values.index_copy_(0, gap[part], values.index_select(0, source[part]))
    return place[:end].index_copy(0, gap, source)
