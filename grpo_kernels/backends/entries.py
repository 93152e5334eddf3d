"""The entries of a row's gradient that matter: sparse products in place of two GEMMs.

The gradient of a row's log-probability by its raw logits is ``slope_v (1[v = y] - p_v)``: nearly
all are tiny. Those above a cut ``eps`` are kept as they are, and one of size ``a <= eps`` with
probability ``a / eps``, as ``eps``: what is kept is right in the mean, and the expected squared
error is the sum of ``a (eps - a)``. Each row has nearly the largest cut that its error allows.

Whether an entry is kept follows from a hash of the row's key and its column: the same run gives the
same bits. Which rows are computed whole follows from expectations, so the mean stays right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import WHOLE, Entries, RowStats, Tile, transformed

# Of the search for a row's cut, in every backend: how many cuts it tries, with what share of the
# row's sizes it starts, and the least root of an error's ratio by which it moves a cut.
READS, START, LEAST_POWER = 2, 0.01, 0.125
_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
_TINY = 1e-300


def row_keys(seed: int, lse: Tensor, first: int = 0) -> Tensor:
    """Return (C,) int32 keys of consecutive rows, from the ``first`` on, with these fp64 lse."""
    # they differ from step to step as the policy does, and from row to row also of equal rows
    bits = lse.double().contiguous().view(torch.int64)
    row = torch.arange(first, first + lse.numel(), device=lse.device)
    key = _mixed(row * GOLDEN + seed)
    key = _mixed(key ^ (bits & _MASK))
    key = _mixed(key ^ (bits >> 32 & _MASK))
    return torch.where(key < 1 << 31, key, key - (1 << 32)).int()


def _mixed(x: Tensor) -> Tensor:
    """Return a 32-bit hash of the low 32 bits (the end of MurmurHash3), in int64."""
    x = x & _MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16


def listed(entries: Entries, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of each entry, row by row."""
    meant = torch.arange(entries.ids.shape[1], device=factor.device) < entries.used[:, None]
    rows = meant.nonzero()[:, 0]
    return rows, entries.ids[meant].long(), entries.values[meant] * factor[rows]


def grouped_sums(
    groups: Tensor, count: int, places: Tensor, values: Tensor, matrix: Tensor
) -> Tensor:
    """Return (count, N) sums of ``values * matrix[places]``, for ascending ``groups``."""
    starts = torch.searchsorted(groups, torch.arange(count + 1, device=groups.device))
    return torch.nn.functional.embedding_bag(
        places,
        matrix.to(values.dtype),
        starts,
        mode="sum",
        per_sample_weights=values,
        include_last_offset=True,
    )


def block_entries(
    tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
) -> Entries:
    """Choose the entries of some rows at once; see ``Backend.extract_entries``."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    column = torch.arange(logits.shape[1], device=logits.device)
    here = column == target[:, None]
    finite = stats.lse.isfinite()
    p = torch.where(finite[:, None], (scores.double() - stats.lse[:, None]).exp(), 0.0)
    others = torch.where(here, 0.0, p)
    total = at_target = others.sum(1)  # 1 - p
    if tanh is not None:
        curve = torch.where(finite[:, None], 1 - tanh.double() ** 2, 0.0)
        others = others * curve
        at_target = at_target * curve.gather(1, target[:, None]).squeeze(1)
    scale = torch.as_tensor(transform.logit_scale / transform.temperature).to(others)
    norm = (at_target**2 + (others * others).sum(1)).sqrt()
    eps = _cuts(others, total, (allowed.double() / scale) ** 2)[:, None]
    large = others > eps
    drawn = torch.where(large, 0.0, others).sum(1) / eps[:, 0].clamp(min=_TINY)
    expected = 1 + large.sum(1) + drawn + 4 * drawn.sqrt()
    hashed = _mixed(keys.long()[:, None] + column * GOLDEN) >> 8  # decides what is kept
    survives = (hashed.double() + 0.5) * 2.0**-24 * eps < others
    kept = torch.where(large, others, torch.where(survives, eps, 0.0))
    count = (kept > 0).sum(1) + 1
    fits = finite & (expected <= slots) & (count <= slots)
    count = torch.where(fits, count, WHOLE).int()
    error = kept - others
    ids = target.new_zeros((len(count), slots), dtype=torch.int32)
    values = kept.new_zeros((len(count), slots))
    meant = (kept > 0) & (count > 0)[:, None]
    rows, columns = torch.nonzero(meant, as_tuple=True)
    place = meant.cumsum(1)[rows, columns]  # from 1: the target is at 0
    ids[rows, place], values[rows, place] = columns.int(), -kept[rows, columns]
    ids[:, 0], values[:, 0] = target.int(), at_target
    values, dtype = (values.t() * scale).t().contiguous(), stats.logp.dtype
    found = (torch.where(fits, x, 0.0) for x in (error.norm(dim=1), error.abs().sum(1)))
    return Entries(ids, values.to(dtype), count, *((x * scale).to(dtype) for x in (*found, norm)))


def _cuts(sizes: Tensor, total: Tensor, allowed: Tensor) -> Tensor:
    """Return nearly the largest cuts whose expected sums of squared errors are ``allowed``."""
    # An error is convex in the cut, and 0 at 0: where it is too large by a factor, the cut over it
    # is within. Next is tried where the error, were it this power of the cut, would be as allowed.
    least = allowed / total.clamp(min=1e-30)
    # above half of the total there is one size at most; drawing it saves nothing unless all may go
    most = torch.maximum(2 * least, total / 2)
    cut, safe = (least * (least + START * total)).sqrt(), torch.zeros_like(least)
    for _ in range(READS):
        below = torch.where(sizes <= cut[:, None], sizes, 0.0)
        slope = below.sum(1)
        error = cut * slope - below.square().sum(1)
        ratio = allowed / error.clamp(min=_TINY)
        safe = torch.maximum(safe, cut * ratio.clamp(max=1))
        power = (error / (cut * slope).clamp(min=_TINY)).clamp(min=LEAST_POWER)
        cut = (cut * ratio**power).clamp(safe, most)
    return safe
