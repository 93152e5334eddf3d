"""Row kernels in Triton: one program per row, a loop over the columns."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowKernels, RowStats, StatsGradients, Tile
from grpo_kernels.backends.triton.dlogits import dlogits_
from grpo_kernels.backends.triton.row_stats import row_stats


class _TritonRows:
    def stats(self, tile: Tile, extras: bool) -> RowStats:
        return row_stats(tile, extras)

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGradients,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        return dlogits_(tile, stats, outer, out_dtype, out)


TRITON_ROWS: RowKernels = _TritonRows()
