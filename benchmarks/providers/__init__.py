"""Implementations that are compared: a file for each library."""

from __future__ import annotations

from benchmarks.providers import (
    backwards,
    bare_gemms,
    cce,
    eager,
    liger,
    ours,
    quack,
    savings,
    torch_lce,
    trl,
)
from benchmarks.providers.base import Provider

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        bare_gemms.BARE_GEMMS,
        *ours.OURS_ALL,
        eager.EAGER,
        eager.EAGER_ENTROPY,
        eager.COMPILE,
        torch_lce.TORCH_LCE,
        trl.TRL,
        liger.LIGER,
        liger.LIGER_TRITON,
        liger.LIGER_SM90,
        cce.CCE,
        cce.CCE_EXACT,
        quack.QUACK,
    )
}
# for their numerics, in the errors by token alone
COMPARED = (eager.EAGER_FP32, eager.VERL_STYLE, liger.LIGER_HEAD)
# those of one benchmark too
EVERY = PROVIDERS | {
    provider.name: provider for provider in (*backwards.OURS, *COMPARED, *savings.VARIANTS)
}
