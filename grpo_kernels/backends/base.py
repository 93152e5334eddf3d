"""What a backend must provide on top of GEMMs.

A row kernel sees one tile of raw logits (C rows, V columns) and knows nothing of losses. It turns
the tile into per-row statistics, and, given the gradients of those statistics, into the gradient of
the tile, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.head import Head, Transform

# A log-probability of less is as good as -inf, whose probability is 0 in every dtype; unlike the
# smallest fp32 it can be multiplied by a gradient before the probability, 0, is.
LEAST_LOGP = -1e4
# of entries of a gradient
ANY_ERROR = 1e30  # or more: the row has no gradient
WHOLE = -1  # the count of a row that does not fit


class Tile(NamedTuple):
    """Rows of raw logits, with what belongs to them."""

    logits: Tensor  # (C, V), columns contiguous
    target: Tensor  # (C,) int64; outside of [0, V): in no column of this tile
    transform: Transform

    def rows(self, index: slice) -> Tile:
        """Return the same for a range of rows."""
        return Tile(self.logits[index], self.target[index], self.transform.rows(index))


class RowStats(NamedTuple):
    """Statistics of each row, in fp32 (fp64 for fp64 logits).

    ``lse`` is fp64 throughout, for ``dlogits_``, whose probabilities are ``exp(z - lse)``: fp32
    would round an lse of 1e4 by 5e-4. The public op casts it.
    """

    logp: Tensor  # (C,) log-probability of the target
    entropy: Tensor  # (C,) nats
    lse: Tensor  # (C,) fp64, logsumexp of the transformed logits
    is_top1: Tensor | None = None  # (C,) bool, the target is the first argmax
    sum_sq_probs: Tensor | None = None  # (C,) sum_j p_j^2
    max_logit: Tensor | None = None  # (C,) largest of the transformed logits
    min_logit: Tensor | None = None  # (C,) smallest of them
    # on request as well, read from a tile of logits: no backend fills them
    mean_logit: Tensor | None = None  # (C,) mean of the transformed logits
    masked_logp: Tensor | None = None  # (C,) logp renormalised over a sampling mask
    topk_logp: Tensor | None = None  # (C, k) log-probabilities of the first k columns
    topk_indices: Tensor | None = None  # (C, k) int64, which these are

    def rows(self, index: slice | Tensor) -> RowStats:
        """Return the same for a subset of rows."""
        return RowStats(*(x[index] if x is not None else None for x in self))  # type: ignore[arg-type]


class StatsGrad(NamedTuple):
    """Gradients of the statistics of C rows, each (C,) or None for zeros."""

    dlogp: Tensor | None
    dentropy: Tensor | None = None
    dmasked: Tensor | None = None  # of masked_logp

    @property
    def nonzero(self) -> Tensor | None:
        """(C,) bool, the rows with a gradient that is not 0; None if all are zeros."""
        given = [x != 0 for x in self if x is not None]
        if len(given) < 2:
            return given[0] if given else None
        return torch.stack(given).any(0)

    def rows(self, index: slice | Tensor) -> StatsGrad:
        """Return the same for a subset of rows."""
        return StatsGrad(*(x[index] if x is not None else None for x in self))

    def times(self, scale: Tensor | None) -> StatsGrad:
        """Return the same, multiplied by a () tensor."""
        if scale is None:
            return self
        return StatsGrad(*(x * scale if x is not None else None for x in self))


class TileGradient(NamedTuple):
    """The gradient of a tile of raw logits: ``dlogits``, each row times its ``row_scale``."""

    dlogits: Tensor  # (C, V)
    row_scale: Tensor | None = None  # (C,) fp32; None: 1

    def weighted(self, rows: Tensor) -> Tensor:
        """Return (C, n) ``rows`` times the scale, for a product with ``dlogits^T``."""
        if self.row_scale is None:
            return rows
        # one rounding, in one kernel
        return torch.mul(rows, self.row_scale[:, None], out=torch.empty_like(rows))


class OutputSpec(NamedTuple):
    """The statistics requested beside those of every call."""

    extras: bool = False  # is_top1, sum_sq_probs, max_logit and min_logit
    mean: bool = False  # mean_logit
    top_k: int = 0  # how many of the first columns; 0: none

    @property
    def tiled(self) -> bool:
        """Whether some of it is read from a tile of logits."""
        return self.mean or self.top_k > 0


# what a backend fills, and what it fills on request, all or none
STATS = ("logp", "entropy", "lse")
EXTRAS = ("is_top1", "sum_sq_probs", "max_logit", "min_logit")
_DTYPES = {
    "is_top1": torch.bool,
    "lse": torch.float64,
    "topk_indices": torch.int64,
}


def dtype_of(name: str, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a field of :class:`RowStats`, ``wide`` that of most."""
    return _DTYPES.get(name, wide)


def shapes_of(rows: torch.Size, wanted: OutputSpec, masked: bool) -> dict[str, torch.Size]:
    """Return the fields of :class:`RowStats` that a call fills, and their shapes."""
    names = (*STATS, *(EXTRAS if wanted.extras else ()))
    shapes = dict.fromkeys(names, rows)
    if masked:
        shapes["masked_logp"] = rows
    if wanted.mean:
        shapes["mean_logit"] = rows
    if wanted.top_k:
        shapes["topk_logp"] = shapes["topk_indices"] = torch.Size((*rows, wanted.top_k))
    return shapes


def empty_stats(rows: int, device: torch.device, extras: bool) -> RowStats:
    """Return uninitialised statistics, each of its own storage: an op's outputs may share none."""

    def empty(name: str) -> Tensor:
        return torch.empty(rows, dtype=dtype_of(name, torch.float32), device=device)

    return RowStats(**{name: empty(name) for name in (*STATS, *(EXTRAS if extras else ()))})


def concatenate(parts: list[RowStats]) -> RowStats:
    """Join the statistics of consecutive row ranges; ``parts`` is not empty."""
    if len(parts) == 1:
        return parts[0]
    columns = ([part[i] for part in parts] for i in range(len(RowStats._fields)))
    return RowStats(*(torch.cat(column) if column[0] is not None else None for column in columns))  # type: ignore[arg-type]


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


class Backend:
    """A way to run the passes over a tile of logits."""

    name: str
    has_tiles = True  # the eager reference forms all logits at once
    generates = False  # whether the loss can run in kernels that are generated from it
    compiles = False  # whether kernels are compiled when they are first launched
    absence = ""  # what is said, and why {}, where it would have served

    def unavailable(self) -> str | None:
        """Say why this machine cannot run it; None if it can."""
        return None

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Say why such tensors cannot use it; None if they can."""
        return None

    def only_by_name(self, device: torch.device) -> str | None:
        """Say why ``"auto"`` passes it over for tensors on ``device``; None if it does not."""
        return None

    def numerics(self, dtype: torch.dtype, head: Head, precision: str, tiled: bool) -> list[str]:
        """Name what its kernels are configured by, for the fingerprint."""
        return []

    def stats(self, tile: Tile, extras: bool) -> RowStats:
        """Compute the statistics of a tile, which is left as it is."""
        raise NotImplementedError(self.name)

    def dlogits_(
        self,
        tile: Tile,
        stats: RowStats,
        outer: StatsGrad,
        out_dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Write the gradient with respect to the raw logits into ``out``, or else their storage.

        With ``p = exp(z - lse)`` and ``H`` the entropy,
        ``dz_j = dlogp (1[j = y] - p_j) - dentropy p_j (log p_j + H)``.

        Returns a (C, V) tensor of ``out_dtype``, that of ``out``. A 16-bit result of fp32 logits in
        their storage lives in the first half of each row's bytes, so its row stride is twice that
        of the logits.
        """
        raise NotImplementedError(self.name)

    def gives_logp_gradient(self, out_dtype: torch.dtype) -> bool:
        """Return whether :meth:`logp_gradient_` exists for gradients of this dtype."""
        return False

    def logp_gradient_(self, tile: Tile) -> tuple[RowStats, TileGradient]:
        """Compute statistics, and write the gradient of each row's ``logp`` over its logits.

        So logits are read once, and the loss may come after: see :meth:`weighted_gradient`.
        """
        raise NotImplementedError(self.name)

    def weighted_gradient(self, gradient: TileGradient, dlogp: Tensor) -> TileGradient:
        """Return that of ``dlogp * logp`` (C,) where ``gradient`` is that of ``logp``.

        A row without weight has a factor of 0, whatever its own.
        """
        raise NotImplementedError(self.name)

    def forms_logits(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        """Return whether :meth:`logits_stats` forms such logits of hidden states of ``dtype``."""
        return False

    def logits_stats(
        self, hidden: Tensor, head: Head, target: Tensor, extras: bool, out: Tensor
    ) -> RowStats:
        """Fill ``out`` (C, V) with the raw logits of ``hidden`` (C, D) before ``head``.

        A row's bits depend on that row alone. The statistics of a target that is none of the
        columns mean nothing.
        """
        raise NotImplementedError(self.name)

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        """Return whether :meth:`linear_stats` exists for these, and is the faster way."""
        return False

    def linear_stats(
        self, hidden: Tensor, head: Head, target: Tensor, precision: str, extras: bool
    ) -> RowStats:
        """Compute statistics of ``hidden`` (T, D) before ``head`` without a tile of logits."""
        raise NotImplementedError(self.name)

    def extract_entries(
        self, tile: Tile, stats: RowStats, keys: Tensor, allowed: Tensor, slots: int
    ) -> Entries:
        """Choose at most ``slots`` entries a row of a tile, which is left as it is.

        ``keys`` (C,) int32 are those of ``row_keys``, ``allowed`` (C,) the L2 norm that each row's
        error is expected to have at most. Of one that is allowed ``ANY_ERROR`` nothing is meant:
        any entries, and any count of them, will do. A row without a finite ``lse`` is whole, and so
        is one that is expected to need more entries.
        """
        raise NotImplementedError(self.name)

    def entries_matmul(self, entries: Entries, factor: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Set ``out[t] = factor[t] sum_k values[t, k] matrix[ids[t, k]]`` for rows not whole.

        ``factor`` is (C,), ``matrix`` (V, N), ``out`` (C, N) of the matrix's dtype or fp32; sums
        are in fp32 or better. Rows that are whole stay as they are.
        """
        raise NotImplementedError(self.name)

    def entries_transposed_matmul(
        self, entries: Entries, factor: Tensor, rows: Tensor, out: Tensor, add: bool
    ) -> None:
        """Set ``out[v]``, or ``add`` to it, the sum of ``factor[t] values[t, k] rows[t]``.

        It is over all t and k with ``ids[t, k] = v``.

        ``rows`` is (C, N), ``out`` (V, N) of their dtype or fp32. The sums are in fp32 or
        better, in the order of the rows, and rounded once; rows that are whole add nothing.
        """
        raise NotImplementedError(self.name)


def output_view(logits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return the (C, V) view of ``logits``' storage in which ``dlogits_`` leaves its result."""
    if out_dtype == logits.dtype:
        return logits
    rows, columns = logits.shape
    ratio = logits.element_size() // out_dtype.itemsize
    row_stride = logits.stride(0) * ratio
    offset = logits.storage_offset() * ratio
    flat = torch.empty(0, dtype=out_dtype, device=logits.device)
    return flat.set_(logits.untyped_storage(), offset, (rows, columns), (row_stride, 1))
