"""The implementations that are compared. Each file has one ``PROVIDER`` or more of one library."""

from __future__ import annotations

from benchmarks.providers import eager, floor, liger, ours, trl
from benchmarks.providers.base import Provider

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        floor.FLOOR,
        ours.OURS,
        ours.OURS_EXACT,
        ours.OURS_TORCH,
        eager.EAGER,
        eager.EAGER_ENTROPY,
        trl.TRL,
        liger.LIGER,
    )
}
