"""Rows of a tile without a gradient give way to those with one, so that no product sees them."""

from __future__ import annotations

import torch
from torch import Tensor

import grpo_kernels.batch.host as host

# A row that moves is read and written once, V values each; in the two products it would have cost
# 4 D V operations. So any move pays, but a product over a few rows less is not always faster.
_LEAST_SHARE = 1 / 16


def surviving_rows(wanted: Tensor | None) -> Tensor | None:
    """Which row each place of a tile takes over, of (C,) bool; None: the tile stays as it is.

    The n wanted rows take the first n places. Those that lie there stay, the others fill the gaps:
    so the fewest rows move. On a GPU nothing moves, since the host would have to wait for ``n``.
    """
    if wanted is None or not host.reading_is_free(wanted):
        return None
    count, total = int(wanted.sum()), wanted.numel()
    if total - count < max(1, total * _LEAST_SHARE):
        return None
    order = torch.arange(count, device=wanted.device)
    order[~wanted[:count]] = count + wanted[count:].nonzero().squeeze(-1)
    return order


def move_rows_(tile: Tensor, order: Tensor) -> Tensor:
    """The rows ``order`` of a (C, V) tile, at its beginning."""
    for place, row in enumerate(order.tolist()):
        if place != row:
            tile[place].copy_(tile[row])
    return tile[: order.numel()]
