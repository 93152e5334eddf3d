"""Implementations that are compared."""

from __future__ import annotations

from benchmarks.providers import eager, libraries, ours
from benchmarks.providers.base import Provider

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        eager.BARE_GEMMS,
        eager.BARE_WHOLE,
        *ours.OURS,
        *eager.EAGER,
        *libraries.LIBRARIES,
    )
}
# only for their numerics, in the errors by token
COMPARED = (*eager.COMPARED, libraries.LIGER_HEAD)
# including the providers of a single benchmark
EVERY = PROVIDERS | {
    provider.name: provider for provider in (*ours.BACKWARDS, *COMPARED, *ours.VARIANTS)
}
