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

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Tile
from grpo_kernels.backends.chunked import row_blocks, transformed

STEPS = 48  # cuts to choose from: each sqrt(2) times the one before
_MASK = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
ANY_ERROR = 1e30  # or more: the row has no gradient
WHOLE = -1  # the count of a row that does not fit


class Entries(NamedTuple):
    """The entries of the gradients of C rows' log-probabilities by their raw logits."""

    ids: Tensor  # (C, K) int32, the target first, the others ascending
    values: Tensor  # (C, K) fp32 (fp64 of fp64 logits)
    used: Tensor  # (C,) int32, how many of K are meant; -1: the row has to be computed whole
    # (C,) L2 norm of what the row's entries differ by from its gradient; 0 of a row that is whole
    error: Tensor
    error_l1: Tensor  # (C,) L1 norm of the same
    norm: Tensor  # (C,) L2 norm of the row's gradient

    @property
    def columns(self) -> int:
        """K."""
        return self.ids.shape[1]

    @staticmethod
    def joined(parts: Sequence[Entries]) -> Entries:
        """Join the entries of consecutive rows."""
        return Entries(*(torch.cat(column) for column in zip(*parts, strict=True)))


class EntryKernels(Protocol):
    """One backend's passes over entries."""

    def extract(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        """Choose at most ``slots`` entries a row of a tile, which is left as it is.

        ``keys`` (C,) int32 are those of :func:`row_keys`, ``allowed`` (C,) the L2 norm that each
        row's error is expected to have at most. Of one that is allowed :data:`ANY_ERROR` nothing is
        meant: any entries, and any count of them, will do. A row without a finite ``lse`` is whole,
        and so is one that is expected to need more entries.
        """
        ...

    def matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Set ``out[t] = factor[t] sum_k values[t, k] matrix[ids[t, k]]`` for rows not whole.

        ``factor`` is (C,), ``matrix`` (V, N), ``out`` (C, N) of the matrix's dtype or fp32; sums
        are in fp32 or better. Rows that are whole stay as they are.
        """
        ...

    def transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        """Set ``out[v]``, or ``add`` to it, the sum of ``factor[t] values[t, k] rows[t]``.

        It is over all t and k with ``ids[t, k] = v``.

        ``rows`` is (C, N), ``out`` (V, N) of their dtype or fp32. The sums are in fp32 or
        better, in the order of the rows, and rounded once; rows that are whole add nothing.
        """
        ...


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


class TorchEntries:
    """Implements :class:`EntryKernels` in plain torch: any device and floating dtype."""

    def extract(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        parts = [
            _extract(tile.rows(block), stats.rows(block), keys[block], allowed[block], slots)
            for block in row_blocks(tile.logits, _BLOCK_ELEMENTS)
        ]
        return Entries.joined(parts)

    def matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        rows, ids, values = _listed(entries, factor)
        used, ids = ids.unique(return_inverse=True)
        product = _sums(rows, len(factor), ids, values, matrix[used])
        kept = entries.used >= 0
        out[kept] = product[kept].to(out.dtype)

    def transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        places, ids, values = _listed(entries, factor)
        order = ids.argsort(stable=True)
        used, ids = ids[order].unique_consecutive(return_inverse=True)
        product = _sums(ids, len(used), places[order], values[order], rows)
        if not add:
            out.zero_()
        out[used] = (out[used] + product).to(out.dtype)


def _listed(entries: Entries, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return row, column and value of each entry, row by row."""
    meant = torch.arange(entries.columns, device=factor.device) < entries.used[:, None]
    rows = meant.nonzero()[:, 0]
    return rows, entries.ids[meant].long(), entries.values[meant] * factor[rows]


def _sums(groups: Tensor, count: int, places: Tensor, values: Tensor, matrix: Tensor) -> Tensor:
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


TORCH_ENTRIES = TorchEntries()
_TINY = 1e-300
_BLOCK_ELEMENTS = 1 << 20  # of a block's rows: some twenty fp64 temporaries


def _extract(tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int) -> Entries:
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
