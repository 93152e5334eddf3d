"""A host's own precision: ours differs from exact results by no more than its rounding explains.

Each comparison takes what our head gives in that precision, what the host's own gives there, and
what that gives in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from grpo_kernels.testing import assert_as_exact_as

BF16 = 8e-3  # the last digit
_ROUNDING = 1e-5
# of a number per step, for the errors of so few differ by chance
_FACTOR, _FLOOR = 4.0, 2e-6
# shares of tokens or samples, of which one may lie on a threshold
_SHARES, _ONE = ("clip_ratio", "clipfrac", "accuracies"), 0.15

Run = tuple[list[dict[str, float]], dict[str, Tensor]]  # a row per step, and the weights at the end


def assert_results_as_exact_as(found: Any, theirs: Any, exact: Any) -> None:
    """Compare every tensor of nested results."""
    leaves = zip(*map(tree_leaves, (found, theirs, exact)), strict=True)
    for number, (own, other, true) in enumerate(leaves):
        own_error, error = (_norm(x.double() - true) / _norm(true) for x in (own, other))
        assert own_error <= max(2 * error, BF16), f"result {number}: {own_error}, theirs {error}"


def assert_run_as_exact_as(found: Run, theirs: Run, exact: Run) -> None:
    """Compare every number that is logged over all steps, and all weights at the end."""
    own, others, true = map(_columns, (found, theirs, exact))
    assert own.keys() == others.keys() == true.keys()
    for name in true:
        assert torch.equal(own[name].isnan(), others[name].isnan()), name
        own_error, error = (_norm(x[name] - true[name]) for x in (own, others))
        floor = _ONE if any(word in name for word in _SHARES) else 0.0
        bound = _FACTOR * error + _FLOOR * max(1.0, _norm(true[name])) + floor
        assert own_error <= bound, f"{name}: error {own_error:.1e}, theirs {error:.1e}"
    weights = [torch.cat([x.flatten() for x in run[1].values()]) for run in (found, theirs, exact)]
    assert_as_exact_as(*weights, _ROUNDING, "weights")


def _norm(x: Tensor) -> float:
    return float(x.nan_to_num().norm())


def _columns(run: Run) -> dict[str, Tensor]:
    """Return the values of each name, NaN where a row has none."""
    rows = [row for row in run[0] if "train_loss" not in row]  # which sums up
    names = dict.fromkeys(name for row in rows for name in row)
    values = {name: [row.get(name) for row in rows] for name in names}
    return {
        name: torch.tensor([torch.nan if x is None else x for x in column], dtype=torch.float64)
        for name, column in values.items()
    }
