"""The entries of a row's gradient that matter: sparse products in place of two GEMMs.

The gradient of a row's log-probability by its raw logits is ``slope_v (1[v = y] - p_v)``: the share
of the target and V - 1 others, nearly all of them tiny. Of these, the ones above a cut ``eps`` are
kept as they are. One of size ``a <= eps`` is kept with probability ``a / eps``, as ``eps``: what is
kept is right in the mean, and the expected squared error is the sum of ``a (eps - a)``. Each row
has the largest cut for which that is within the error that it is allowed.

Whether an entry is kept follows from a hash of the row's key and its column: the same run gives the
same bits. Which rows are computed whole follows from expectations, so the mean stays right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import WHOLE, Entries, RowStats, Tile
from grpo_kernels.backends.chunked import transformed

STEPS = 48  # cuts to choose from: each sqrt(2) times the one before
_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
_TINY = 1e-300


def row_keys(seed: int, lse: Tensor, first: int = 0) -> Tensor:
    """Return (C,) int32 keys of consecutive rows, the ``first`` of them given, with these fp64 lse.

    They differ from step to step as the policy does, from row to row also where rows are alike, and
    not from run to run.
    """
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


def uniforms(keys: Tensor, columns: int) -> Tensor:
    """Return (C, V) fp64 numbers in (0, 1), multiples of 2^-25: those that decide what is kept."""
    column = torch.arange(columns, device=keys.device)
    hashed = _mixed(keys.long()[:, None] + column * GOLDEN)
    return ((hashed >> 8).double() + 0.5) * 2.0**-24


def listed(entries: Entries, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of each entry, row by row."""
    meant = torch.arange(entries.columns, device=factor.device) < entries.used[:, None]
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


def extract_block(
    tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
) -> Entries:
    """Choose the entries of some rows at once; see ``Backend.extract_entries``."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    here = torch.arange(logits.shape[1], device=logits.device) == target[:, None]
    finite = stats.lse.isfinite()
    p = torch.where(finite[:, None], (scores.double() - stats.lse[:, None]).exp(), 0.0)
    others = torch.where(here, 0.0, p)
    at_target = others.sum(1)  # 1 - p
    if tanh is not None:
        curve = torch.where(finite[:, None], 1 - tanh.double() ** 2, 0.0)
        others = others * curve
        at_target = at_target * curve.gather(1, target[:, None]).squeeze(1)
    scale = torch.as_tensor(transform.logit_scale / transform.temperature).to(others)
    norm = (at_target**2 + (others * others).sum(1)).sqrt()
    eps, expected = _cuts(others, (allowed.double() / scale) ** 2)
    survives = uniforms(keys, logits.shape[1]) * eps < others
    kept = torch.where(others > eps, others, torch.where(survives, eps, 0.0))
    count = (kept > 0).sum(1) + 1
    fits = finite & (expected <= slots) & (count <= slots)
    count = torch.where(fits, count, WHOLE).int()
    error = kept - others
    ids, values = _packed(kept, at_target, target, count, slots)
    found = (*(torch.where(fits, x, 0.0) for x in (error.norm(dim=1), error.abs().sum(1))), norm)
    dtype = stats.logp.dtype
    return Entries(
        ids,
        (values.t() * scale).t().to(dtype).contiguous(),
        count,
        *((x * scale).to(dtype) for x in found),
    )


def _cuts(sizes: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's cut (C, 1), and how many entries it is expected to need at most (C,).

    ``allowed`` (C,) is the expected sum of squared errors.
    """
    ascending = sizes.sort(1).values
    none = ascending.new_zeros(len(sizes), 1)
    sums = torch.cat([none, ascending.cumsum(1)], 1)
    squares = torch.cat([none, ascending.square().cumsum(1)], 1)
    steps = torch.arange(STEPS, device=sizes.device)
    # the first is within the tolerance, whatever lies below it
    grid = (allowed / sums[:, -1].clamp(min=_TINY))[:, None] * 2.0 ** (steps / 2)
    below = torch.searchsorted(ascending, grid, right=True)
    within = grid * sums.gather(1, below) - squares.gather(1, below) <= allowed[:, None]
    last = (within[:, 1:].long().cumprod(1)).sum(1, keepdim=True)
    eps, below = grid.gather(1, last), below.gather(1, last)
    drawn = sums.gather(1, below) / eps.clamp(min=_TINY)
    expected = 1 + sizes.shape[1] - below + drawn + 4 * drawn.sqrt()
    return eps, expected.squeeze(1)


def _packed(
    kept: Tensor, at_target: Tensor, target: Tensor, count: Tensor, slots: int
) -> tuple[Tensor, Tensor]:
    """Return ids and values of what is kept, in the order of :class:`Entries`."""
    ids = target.new_zeros((len(count), slots), dtype=torch.int32)
    values = kept.new_zeros((len(count), slots))
    meant = (kept > 0) & (count > 0)[:, None]
    rows, columns = torch.nonzero(meant, as_tuple=True)
    place = meant.cumsum(1)[rows, columns]  # from 1: the target is at 0
    ids[rows, place], values[rows, place] = columns.int(), -kept[rows, columns]
    ids[:, 0], values[:, 0] = target.int(), at_target
    return ids, values
