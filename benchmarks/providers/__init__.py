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
# for their numerics, in the errors by token alone
COMPARED = (*eager.COMPARED, libraries.LIGER_HEAD)
# those of one benchmark too
EVERY = PROVIDERS | {
    provider.name: provider for provider in (*ours.BACKWARDS, *COMPARED, *ours.VARIANTS)
}
