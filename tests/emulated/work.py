"""What row kernels execute for a logit, counted in the emulator at two vocabularies.

The difference between the two is what a logit costs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROWS = 2  # of the logits
OF_ENTRIES = (65536, 131072)  # whole words of marks
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# kinds of instructions, by their names
_KINDS = {
    "matrix": r"V_(SMFMAC|MFMA|DOT)",
    "transcendental": r"V_(EXP|LOG|RCP|RSQ|SQRT|SIN|COS)_",
    "shared": r"DS_",
    "load": r"(GLOBAL|BUFFER)_LOAD",
    "store": r"(GLOBAL|BUFFER)_STORE",
    "wait": r"S_(WAITCNT|BARRIER|NOP|SLEEP)",
    "vector": r"V_",
    "scalar": r"",
}
Run = Callable[[int, torch.dtype], dict[str, Tensor]]


def logits_of(columns: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, columns, generator=generator)
    return logits.to(dtype), torch.arange(rows) * (columns - 1) // (rows - 1)


def one_read(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read logits once for both: what a loss of log-probabilities takes."""
    from grpo_kernels.backends import Tile
    from grpo_kernels.backends.triton import logp_gradient_
    from grpo_kernels.head import Transform

    logits, target = logits_of(columns, dtype)
    stats, (exponentials, unit) = logp_gradient_(Tile(logits, target, Transform()))
    gradient = exponentials.float() * unit[:, None]
    return {"logp": stats.logprobs, "entropy": stats.entropy, "gradient": gradient}


def entries(stored: bool) -> Run:
    """Choose the entries of a bounded backward, from logits or from their exponentials."""

    def run(columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
        from grpo_kernels.backends import Tile
        from grpo_kernels.backends.triton import extract_entries, logp_gradient_, row_stats
        from grpo_kernels.head import Transform

        logits, target = logits_of(columns, dtype)
        tile, gradient = Tile(logits, target, Transform()), None
        if stored:
            stats, gradient = logp_gradient_(tile)
        else:
            stats = row_stats(tile, False)
        extract_entries(
            tile=tile,
            stats=stats,
            seed=1,
            first=0,
            cuts=torch.full((ROWS,), 0.01),
            slots=96,
            gradient=gradient,
        )
        return {"logp": stats.logprobs}

    return run


def per_logit(few: list[Any], many: list[Any], logits: int) -> list[dict[str, Any]]:
    """Return what each kernel did more at the larger size, for each logit more.

    Of instructions, for a lane each.
    """
    found: dict[str, Counter[str]] = {}
    for sign, launches in ((-1, few), (1, many)):
        for launch in launches:
            work = found.setdefault(launch.kernel, Counter())
            for name, count in launch.work.instructions.items():
                kind = next(kind for kind, names in _KINDS.items() if re.match(names, name))
                work[kind] += sign * 64 * count
            work["read"] += sign * launch.work.read
            work["written"] += sign * launch.work.written
    return [
        {
            "kernel": kernel,
            "instructions": {kind: round(work[kind] / logits, 2) for kind in _KINDS},
            "read": round(work["read"] / logits, 2),
            "written": round(work["written"] / logits, 2),
        }
        for kernel, work in found.items()
    ]
