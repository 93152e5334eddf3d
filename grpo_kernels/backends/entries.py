"""The entries of a row's gradient that matter: sparse products instead of two GEMMs.

Gradient sparsification by magnitude: Wangni et al., arXiv:1710.09854. The gradient of a row's
log-probability with respect to its raw logits is ``slope_v (1[v = y] - p_v)``; with a gradient of
the entropy, see ``Backend.dlogits_``. Nearly all of its entries are tiny. Entries larger than a cut
are kept. The others are the tail: an entry of size ``a`` is drawn with probability ``a / cut``, and
kept with the size of the cut. So the kept entries are right on average, and their expected squared
error is the sum of ``a (cut - a)`` over the tail. All rows share a cut, which keeps the fewest
entries for a given total error; it is found from a sample of the columns.

The tail is sampled systematically (Madow, 1949). Strand ``s`` consists of the columns ``s``,
``s + STRANDS``, ``s + 2 STRANDS``, ... It draws the entries at which its running sum passes a
multiple of the cut, starting from a hash of row and strand. The same run gives the same bits.
Expectations decide which rows are computed whole, so the average stays right.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.backends.base import (
    ANY_ERROR,
    LEAST_LOGP,
    WHOLE,
    Entries,
    RowStats,
    StatsGrad,
    Tile,
    TileGradient,
    slope,
    transformed,
)

STRANDS = 2048
# To choose a cut, one in _BLOCKS blocks of STRANDS columns is sampled per row, and each block at
# least _FEWEST times over all rows.
_BLOCKS, _FEWEST = 32, 4
NUM_CUTS = 12  # cuts that are tried
GOLDEN = 0x9E3779B9
_MASK = 0xFFFFFFFF
TINY = 1e-30


def row_keys(seed: int, lse: Tensor, first: int = 0) -> Tensor:
    """Return (C,) int32 keys of consecutive rows, starting at ``first``, with these fp64 lse."""
    # keys differ between steps, as the policy does, and between rows, even equal ones
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


def sampled_blocks(rows: int, columns: int) -> tuple[int, int]:
    """Return the number of blocks of STRANDS columns in a row, and how many are sampled."""
    blocks = -(-columns // STRANDS)
    enough = -(-_FEWEST * blocks // max(rows, 1))
    return blocks, min(blocks, max(-(-blocks // _BLOCKS), enough))


def best_cut(sums: Tensor, cuts: Tensor, allowed: float) -> Tensor:
    """Return the () cut with an expected squared error of ``allowed``.

    ``sums`` (2, K) are the sums of the tails' sizes and squares, for K ascending ``cuts``.
    """
    # the error is convex in the cut, and 0 at 0, so a chord is above it
    errors = cuts * sums[0] - sums[1]
    fits = errors <= allowed
    low, low_error = (torch.where(fits, x, 0.0).amax() for x in (cuts, errors))
    high, high_error = (torch.where(fits, torch.inf, x).amin() for x in (cuts, errors))
    between = (allowed - low_error) * (high - low) / (high_error - low_error)
    return torch.where(high.isfinite(), low + between, low)


def ladder(least: Tensor) -> Tensor:
    """Return the (K,) cuts to try, from ``least`` () to 1."""
    steps = torch.linspace(1, 0, NUM_CUTS, dtype=least.dtype, device=least.device)
    return least.clamp(max=1) ** steps


def listed(entries: Entries, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of each entry, row by row."""
    meant = torch.arange(entries.ids.shape[1], device=factor.device) < entries.used[:, None]
    rows = meant.nonzero()[:, 0]
    return rows, entries.ids[meant].long(), entries.values[meant] * factor[rows]


def grouped_sums(
    groups: Tensor,
    count: int,
    places: Tensor,
    values: Tensor,
    matrix: Tensor,
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


def block_tail_sums(
    tile: Tile,
    stats: RowStats,
    weight: Tensor,
    cuts: Tensor,
    grad_stats: StatsGrad | None,
    first: int,
    sampled: tuple[int, int],
) -> Tensor:
    """Sum the sampled tails of some rows at once; see ``Backend.tail_sums``."""
    blocks, count = sampled
    sizes = _gradient(tile, stats, grad_stats)[0].abs()
    row = torch.arange(first, first + len(sizes), device=sizes.device)[:, None]
    spread = torch.arange(count, device=sizes.device) * blocks // count
    index = ((row + spread) % blocks)[:, :, None].expand(-1, -1, STRANDS)
    sizes = _by_block(sizes).gather(1, index).flatten(1) * weight[:, None]
    tails = [torch.where(sizes <= cut, sizes, 0.0) for cut in cuts]
    sums = [torch.stack([tail.sum(1), tail.square().sum(1)], 1) for tail in tails]
    return torch.stack(sums, 2)


def block_entries(
    tile: Tile,
    stats: RowStats,
    keys: Tensor,
    cuts: Tensor,
    slots: int,
    grad_stats: StatsGrad | None,
) -> Entries:
    """Choose the entries of some rows at once; see ``Backend.extract_entries``."""
    others, at_target = _gradient(tile, stats, grad_stats)
    sizes = others.abs()
    cut = cuts.double().clamp(min=TINY)[:, None]
    large = sizes > cut
    tail = torch.where(large, 0.0, sizes)
    drawn = torch.where(_drawn(tail / cut, keys), cut * others.sign(), 0.0)
    kept = torch.where(large, others, drawn)
    target = tile.target
    here = (target >= 0) & (target < tile.logits.shape[1])  # otherwise on another rank
    sums = tail.sum(1)
    expected = sums / cut[:, 0]
    count = (kept != 0).sum(1) + here
    fits = here + large.sum(1) + expected + 4 * expected.sqrt() <= slots
    fits &= stats.lse.isfinite() & (count <= slots)
    count = torch.where(fits, count, WHOLE)
    count = torch.where(cuts >= ANY_ERROR, 0, count).int()
    ids, values = _in_slots(
        kept=kept,
        at_target=at_target,
        target=torch.where(here, target, -1),
        count=count,
        slots=slots,
    )
    error = kept - others
    known = count > 0
    squares = tail.square().sum(1)
    expected_error = (cut[:, 0] * sums - squares).clamp(min=0).sqrt()
    squares += torch.where(large & fits[:, None], sizes, 0.0).square().sum(1)
    norm = (at_target**2 + squares).sqrt()
    dtype = stats.logprobs.dtype
    return Entries(
        ids=ids,
        values=values.to(dtype),
        used=count,
        error=torch.where(known, error.norm(dim=1), 0.0).to(dtype),
        error_l1=torch.where(known, error.abs().sum(1), 0.0).to(dtype),
        expected_error=torch.where(known, expected_error, 0.0).to(dtype),
        norm=norm.to(dtype),
    )


def _drawn(probabilities: Tensor, keys: Tensor) -> Tensor:
    """Sample entries (C, V) with these probabilities, systematically in each strand."""
    steps = _by_block(probabilities).cumsum(1)
    strand = torch.arange(STRANDS, device=keys.device)
    start = (_mixed(keys.long()[:, None] + strand * GOLDEN) >> 8).double().add(0.5) * 2.0**-24
    passed = torch.ceil(steps - start[:, None])  # draws so far
    drawn = passed.diff(dim=1, prepend=torch.zeros_like(passed[:, :1])) > 0
    return drawn.flatten(1)[:, : probabilities.shape[1]]


def _in_slots(
    kept: Tensor,  # (C, V), 0 for entries that are not kept
    at_target: Tensor,  # (C,)
    target: Tensor,  # (C,); -1: on another rank
    count: Tensor,  # (C,) entries of a row including the target, or WHOLE
    slots: int,
) -> tuple[Tensor, Tensor]:
    """Return ids and values (C, slots) of the rows' entries, the target's last."""
    # an extra slot absorbs the target of rows that have none here
    ids = target.new_zeros((len(count), slots + 1), dtype=torch.int32)
    values = kept.new_zeros((len(count), slots + 1))
    listed_here = (kept != 0) & (count > 0)[:, None]
    rows, places = torch.nonzero(listed_here, as_tuple=True)
    slot = listed_here.cumsum(1)[rows, places] - 1
    ids[rows, slot] = places.int()
    values[rows, slot] = kept[rows, places]
    last = torch.where((target >= 0) & (count > 0), count - 1, slots)
    own = torch.arange(len(count), device=last.device)
    ids[own, last] = target.int()
    values[own, last] = at_target
    return ids[:, :slots], values[:, :slots]


def _gradient(tile: Tile, stats: RowStats, grad_stats: StatsGrad | None) -> tuple[Tensor, Tensor]:
    """Return the gradient of raw logits (C, V), with 0 at the target, and its value at the target
    (C,), 0 if that is in no column; in fp64."""
    logits, target, transform = tile
    scores, tanh = transformed(logits, transform)
    finite = stats.lse.isfinite()[:, None]
    logp = (scores.double() - stats.lse[:, None]).clamp(min=LEAST_LOGP)
    others = torch.where(finite, -logp.exp(), 0.0)
    if grad_stats is not None:
        dlogp = grad_stats.dlogp
        dentropy = grad_stats.dentropy
        assert dlogp is not None and dentropy is not None
        entropy = stats.entropy.double()
        others = others * (dlogp[:, None] + dentropy[:, None] * (logp + entropy[:, None]))
    at_target = torch.where(finite[:, 0], _by_target_score(stats, grad_stats), 0.0)
    here = (target >= 0) & (target < logits.shape[1])
    at_target = at_target * here
    place = (target * here)[:, None]
    if tanh is not None:
        curve = torch.where(finite, 1 - tanh.double() ** 2, 0.0)
        others = others * curve
        at_target = at_target * curve.gather(1, place).squeeze(1)
    others = torch.where(here[:, None], others.scatter(1, place, 0.0), others)
    scale = torch.as_tensor(transform.logit_scale / transform.temperature).to(others)
    return (others.t() * scale).t(), at_target * scale


def row_weights(grad_stats: StatsGrad) -> Tensor:
    """Return the factors of the rows' sizes (C,), in fp64; 0 for rows without a gradient."""
    assert grad_stats.dlogp is not None
    if grad_stats.dentropy is None:
        return grad_stats.dlogp.double().abs()
    return ((grad_stats.dlogp != 0) | (grad_stats.dentropy != 0)).double()  # sizes include it


def sizes_at_target(
    tile: Tile, stats: RowStats, grad_stats: StatsGrad | None, gradient: TileGradient | None
) -> Tensor:
    """Return the sizes of the gradients at the targets, (C,) fp64, a lower bound of their norms.

    For a gradient of the log-probability, this is at least the sum of all other sizes. It is 0 for
    a row without a finite ``lse``, and for a target outside the tile.
    """
    own = torch.arange(len(tile.target), device=tile.target.device)
    if gradient is not None:
        dlogits, scale = gradient
        assert scale is not None
        size = dlogits[own, tile.target].double() * scale
        return torch.where(stats.lse.isfinite(), size, 0.0)
    here = (tile.target >= 0) & (tile.target < tile.logits.shape[1])
    picked = tile.logits[own, tile.target * here].double().unsqueeze(-1)
    slopes = slope(torch.ones_like(picked), tile.transform, transformed(picked, tile.transform)[1])
    size = _by_target_score(stats, grad_stats).abs() * slopes.squeeze(-1)
    return torch.where(here & stats.lse.isfinite(), size, 0.0)


def _by_target_score(stats: RowStats, grad_stats: StatsGrad | None) -> Tensor:
    """Return the gradients of the targets' transformed logits, (C,) fp64."""
    logp = stats.logprobs.double()
    others = -torch.expm1(logp)  # 1 - p
    if grad_stats is None:
        return others
    assert grad_stats.dlogp is not None and grad_stats.dentropy is not None
    bonus = logp.exp() * (logp.clamp(min=LEAST_LOGP) + stats.entropy)
    return others * grad_stats.dlogp - bonus * grad_stats.dentropy


def _by_block(values: Tensor) -> Tensor:
    """Return (C, V) values as (C, blocks, STRANDS), padded with zeros."""
    return pad(values, (0, -values.shape[1] % STRANDS)).unflatten(1, (-1, STRANDS))
