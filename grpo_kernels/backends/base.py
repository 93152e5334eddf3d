"""The inputs and outputs of row kernels, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_kernels.head import Transform, stats_dtype

# Replaces -inf as a log-probability: its probability is 0 in every dtype, but a gradient times it
# is not NaN.
LEAST_LOGP = -1e4
# One block of rows at a time keeps the fp32 temporaries of a 16-bit tile small.
BLOCK_ELEMENTS = 1 << 23
# for entries of a gradient
ANY_ERROR = 1e30  # a cut of this or more: the row has no gradient
WHOLE = -1  # the count of a row with too many entries


class Tile(NamedTuple):
    """Rows of raw logits, with their targets and transform."""

    logits: Tensor  # (C, V), columns contiguous
    target: Tensor  # (C,) int64; outside [0, V): in no column of this tile
    transform: Transform

    def rows(self, index: slice) -> Tile:
        """Return the same for a range of rows."""
        return Tile(self.logits[index], self.target[index], self.transform.rows(index))


class RowStats(NamedTuple):
    """Statistics of each row, in fp32 (fp64 for fp64 logits).

    ``lse`` is always fp64, for the probabilities ``exp(z - lse)`` in ``dlogits_``: fp32 would round
    an lse of 1e4 by 5e-4. The public op casts it.
    """

    logprobs: Tensor  # (C,) log-probabilities of the targets
    entropy: Tensor  # (C,) nats
    lse: Tensor  # (C,) fp64, logsumexp of the transformed logits
    is_top1: Tensor | None = None  # (C,) bool, the target is the first argmax
    sum_sq_probs: Tensor | None = None  # (C,) sum_j p_j^2
    max_logit: Tensor | None = None  # (C,) largest of the transformed logits
    min_logit: Tensor | None = None  # (C,) smallest of the transformed logits
    # optional, too, but computed from a tile of logits, not by a backend
    mean_logit: Tensor | None = None  # (C,) mean of the transformed logits
    masked_logprobs: Tensor | None = (
        None  # (C,) log-probabilities renormalized over a sampling mask
    )
    topk_logprobs: Tensor | None = None  # (C, k) log-probabilities of the first k columns
    topk_indices: Tensor | None = None  # (C, k) int64, these columns

    @property
    def for_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The statistics that ``dlogits_`` needs."""
        return self.logprobs, self.entropy, self.lse

    def rows(self, index: slice | Tensor) -> RowStats:
        """Return the same for a subset of rows."""
        return RowStats(*(x[index] if x is not None else None for x in self))  # type: ignore[arg-type]


class StatsGrad(NamedTuple):
    """Gradients of the statistics of C rows, each (C,) or None for zeros."""

    dlogp: Tensor | None
    dentropy: Tensor | None = None
    dmasked: Tensor | None = None  # of masked_logprobs

    @property
    def nonzero(self) -> Tensor | None:
        """(C,) bool, rows with a nonzero gradient; None if all are zeros."""
        nonzero_parts = [x != 0 for x in self if x is not None]
        return functools.reduce(torch.logical_or, nonzero_parts) if nonzero_parts else None

    def rows(self, index: slice | Tensor) -> StatsGrad:
        """Return the same for a subset of rows."""
        return StatsGrad(*(x[index] if x is not None else None for x in self))

    def times(self, scale: Tensor | None) -> StatsGrad:
        """Return the same, multiplied by a () tensor."""
        if scale is None:
            return self
        return StatsGrad(*(x * scale if x is not None else None for x in self))


class TileGradient(NamedTuple):
    """The gradient of a tile of raw logits: the rows of ``dlogits`` times ``row_scale``."""

    dlogits: Tensor  # (C, V)
    row_scale: Tensor | None = None  # (C,) fp32; None: 1

    def rows(self, index: slice) -> TileGradient:
        """Return the same for a range of rows."""
        scale = self.row_scale
        return TileGradient(self.dlogits[index], None if scale is None else scale[index])


class OutputSpec(NamedTuple):
    """The statistics requested in addition to the ones of every call."""

    extras: bool = False  # is_top1, sum_sq_probs, max_logit and min_logit
    mean: bool = False  # mean_logit
    top_k: int = 0  # number of first columns; 0: none

    @property
    def tiled(self) -> bool:
        """Whether any of them needs a tile of logits."""
        return self.mean or self.top_k > 0


# filled by a backend always, and on request (all or none)
STATS = ("logprobs", "entropy", "lse")
EXTRAS = ("is_top1", "sum_sq_probs", "max_logit", "min_logit")
_DTYPES = {"is_top1": torch.bool, "lse": torch.float64, "topk_indices": torch.int64}


def dtype_of(name: str, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a field of :class:`RowStats`; most are ``wide``."""
    return _DTYPES.get(name, wide)


def shapes_of(rows: torch.Size, outputs: OutputSpec, masked: bool) -> dict[str, torch.Size]:
    """Return the fields of :class:`RowStats` that a call fills, and their shapes."""
    shapes = dict.fromkeys((*STATS, *EXTRAS) if outputs.extras else STATS, rows)
    if masked:
        shapes["masked_logprobs"] = rows
    if outputs.mean:
        shapes["mean_logit"] = rows
    if outputs.top_k:
        shapes["topk_logprobs"] = shapes["topk_indices"] = torch.Size((*rows, outputs.top_k))
    return shapes


def empty_stats(rows: int, device: torch.device, extras: bool) -> RowStats:
    """Return uninitialized statistics in separate storages: an op's outputs must not share one."""
    names = (*STATS, *EXTRAS) if extras else STATS
    dtypes = [_DTYPES.get(name, torch.float32) for name in names]
    return RowStats(*[torch.empty(rows, dtype=dtype, device=device) for dtype in dtypes])


class Entries(NamedTuple):
    """The kept entries of C rows' gradients with respect to their raw logits."""

    ids: Tensor  # (C, K) int32, in a fixed order, each at most once
    values: Tensor  # (C, K) fp32 (fp64 for fp64 logits)
    used: Tensor  # (C,) int32, number of valid slots; -1: the row must be computed whole
    # (C,) L2 norm of the difference between the entries and the row's gradient; 0 for a whole row
    error: Tensor
    error_l1: Tensor  # (C,) L1 norm of the same
    expected_error: Tensor  # (C,) root of the mean of ``error ** 2`` over all samples
    # (C,) L2 norm of the row's gradient; for a whole row without the entries above the cut
    norm: Tensor

    @staticmethod
    def empty(rows: int, slots: int, device: torch.device) -> Entries:
        """Return entries to be filled; unused slots are 0."""
        ids = torch.zeros((rows, slots), dtype=torch.int32, device=device)
        used = torch.empty(rows, dtype=torch.int32, device=device)
        norms = (torch.empty(rows, device=device) for _ in range(4))
        return Entries(ids, torch.zeros((rows, slots), device=device), used, *norms)


Record = TypeVar("Record", RowStats, StatsGrad, Entries)


def concatenate(parts: Sequence[Record]) -> Record:
    """Join the records of consecutive row ranges; ``parts`` is not empty."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*parts, strict=True)
    joined = [None if column[0] is None else torch.cat(column) for column in columns]
    return type(parts[0])(*joined)  # type: ignore[arg-type]


def output_view(logits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Return a (C, V) view of the storage of ``logits`` for the result of ``dlogits_``.

    16-bit results for fp32 logits are in the first half of each row's bytes.
    """
    if out_dtype == logits.dtype:
        return logits
    assert (logits.dtype.itemsize, out_dtype.itemsize) == (4, 2), (logits.dtype, out_dtype)
    return logits.view(out_dtype)[:, : logits.shape[1]]


def row_blocks(logits: Tensor, elements: int) -> list[slice]:
    """Cut rows into ranges of a power of two, of about ``elements`` logits."""
    # so that a tile of such a height is cut evenly: a library's sum may depend on the row count
    rows, columns = logits.shape
    step = 1 << (max(1, elements // max(columns, 1)).bit_length() - 1)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def transformed(logits: Tensor, transform: Transform) -> tuple[Tensor, Tensor | None]:
    """Return the scores of (C, V) logits in the statistics dtype, and the tanh of a softcap."""
    scores = logits.to(stats_dtype(logits.dtype), copy=True)
    if transform.logit_scale != 1.0:
        scores *= transform.logit_scale
    tanh = None
    if transform.softcap is not None:
        tanh = scores.div_(transform.softcap).tanh_()
        scores = tanh * transform.softcap
    scores /= _per_row(transform.temperature)
    return scores, tanh


def slope(gradient: Tensor, transform: Transform, tanh: Tensor | None) -> Tensor:
    """Turn a (C, V) gradient with respect to scores into one with respect to logits, in place."""
    gradient *= _per_row(transform.logit_scale / transform.temperature)
    if tanh is not None:
        gradient *= 1 - tanh * tanh
    return gradient


def _per_row(value: float | Tensor) -> float | Tensor:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value
