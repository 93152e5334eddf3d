"""Row kernels in Triton: one program per row, a loop over the columns."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowKernels, RowStats, Transform


def unavailable() -> str | None:
    """None when the kernels run on this machine, else the reason."""
    try:
        from triton import knobs
    except ImportError:
        return "triton 3.4 or newer is not installed"
    if torch.cuda.is_available() or knobs.runtime.interpret:
        return None
    return "no CUDA or ROCm device is present (TRITON_INTERPRET=1 runs the kernels on CPU, slowly)"


class _TritonRows:
    """The kernels are imported on first use: this module stays importable without Triton."""

    def stats(self, logits: Tensor, target: Tensor, transform: Transform, extras: bool) -> RowStats:
        from grpo_kernels.backends.triton.row_stats import row_stats

        return row_stats(logits, target, transform, extras)

    def dlogits_(
        self,
        logits: Tensor,
        target: Tensor,
        transform: Transform,
        stats: RowStats,
        dlogp: Tensor,
        dentropy: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        from grpo_kernels.backends.triton.dlogits import dlogits_

        return dlogits_(logits, target, transform, stats, dlogp, dentropy, out_dtype)


TRITON_ROWS: RowKernels = _TritonRows()
