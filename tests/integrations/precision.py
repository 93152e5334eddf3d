"""A host's own precision: ours differs from exact results by no more than its rounding explains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_FACTOR, _FLOOR = 2.0, 2e-6
_FACTOR_OF_STEPS = 4.0  # of a number per step: so few rounding errors differ by chance
# shares of tokens or samples, of which one may lie on a threshold
_SHARES = ("clip_ratio", "clipfrac", "accuracies")
_ONE = 0.15

Run = tuple[list[dict[str, float]], dict[str, Tensor]]  # a row per step, and the weights at the end


def assert_run_as_exact_as(found: Run, theirs: Run, exact: Run) -> None:
    """Compare every number that is logged over all steps, and all weights at the end.

    Args:
        found, theirs: in the host's precision, with our head and with the host's own.
        exact: the host's own in fp32.
    """
    assert len(found[0]) == len(theirs[0]) == len(exact[0])
    columns = [_columns(run) for run in (found, theirs, exact)]
    for name, true in columns[2].items():
        floor = _ONE if any(word in name for word in _SHARES) else 0.0
        of_name = (columns[0][name], columns[1][name], true)
        assert_as_exact_as(*of_name, name, factor=_FACTOR_OF_STEPS, floor=floor)
    weights = [torch.cat([x.flatten() for x in run[1].values()]) for run in (found, theirs, exact)]
    assert_as_exact_as(*weights, "weights")


def assert_as_exact_as(
    found: Tensor,
    theirs: Tensor,
    exact: Tensor,
    name: str = "",
    *,
    factor: float = _FACTOR,
    floor: float = 0.0,
) -> None:
    """Compare norms of errors."""
    assert torch.equal(found.isnan(), theirs.isnan()), name
    exact = exact.double().nan_to_num()
    ours, others = ((x.double().nan_to_num() - exact).norm().item() for x in (found, theirs))
    bound = factor * others + _FLOOR * max(1.0, exact.norm().item()) + floor
    assert ours <= bound, f"{name}: {ours:.1e} with our head, {others:.1e} with theirs"


def _columns(run: Any) -> dict[str, Tensor]:
    """Return the values of each name, NaN where a row has none."""
    rows = [row for row in run[0] if "train_loss" not in row]  # which sums up
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: torch.tensor([torch.nan if x is None else x for x in column], dtype=torch.float64)
        for name, column in values.items()
    }
