"""What row kernels take and give, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_kernels.head import Transform, stats_dtype

# A log-probability of less is as good as -inf, whose probability is 0 in every dtype; it can be
# multiplied by a gradient first.
LEAST_LOGP = -1e4
# One block of rows at a time keeps the fp32 temporaries of a 16-bit tile small.
BLOCK_ELEMENTS = 1 << 23
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

    logprobs: Tensor  # (C,) log-probabilities of the targets
    entropy: Tensor  # (C,) nats
    lse: Tensor  # (C,) fp64, logsumexp of the transformed logits
    is_top1: Tensor | None = None  # (C,) bool, the target is the first argmax
    sum_sq_probs: Tensor | None = None  # (C,) sum_j p_j^2
    max_logit: Tensor | None = None  # (C,) largest of the transformed logits
    min_logit: Tensor | None = None  # (C,) smallest of them
    # on request as well, read from a tile of logits: no backend fills them
    mean_logit: Tensor | None = None  # (C,) mean of the transformed logits
    masked_logprobs: Tensor | None = (
        None  # (C,) log-probabilities renormalized over a sampling mask
    )
    topk_logprobs: Tensor | None = None  # (C, k) log-probabilities of the first k columns
    topk_indices: Tensor | None = None  # (C, k) int64, which these are

    @property
    def for_backward(self) -> tuple[Tensor, Tensor, Tensor]:
        """The statistics that ``dlogits_`` reads."""
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
        """(C,) bool, the rows with a gradient that is not 0; None if all are zeros."""
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
    """The gradient of a tile of raw logits: ``dlogits``, each row times its ``row_scale``."""

    dlogits: Tensor  # (C, V)
    row_scale: Tensor | None = None  # (C,) fp32; None: 1

    def rows(self, index: slice) -> TileGradient:
        """Return the same for a range of rows."""
        scale = self.row_scale
        return TileGradient(self.dlogits[index], None if scale is None else scale[index])


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
STATS = ("logprobs", "entropy", "lse")
EXTRAS = ("is_top1", "sum_sq_probs", "max_logit", "min_logit")
_DTYPES = {"is_top1": torch.bool, "lse": torch.float64, "topk_indices": torch.int64}


def dtype_of(name: str, wide: torch.dtype) -> torch.dtype:
    """Return the dtype of a field of :class:`RowStats`, ``wide`` that of most."""
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
    """Return uninitialised statistics, each of its own storage: an op's outputs may share none."""
    names = (*STATS, *EXTRAS) if extras else STATS
    dtypes = [_DTYPES.get(name, torch.float32) for name in names]
    return RowStats(*[torch.empty(rows, dtype=dtype, device=device) for dtype in dtypes])


class Entries(NamedTuple):
    """The entries of the gradients of C rows' log-probabilities by their raw logits."""

    ids: Tensor  # (C, K) int32, in a fixed order, each at most once
    values: Tensor  # (C, K) fp32 (fp64 of fp64 logits)
    used: Tensor  # (C,) int32, how many of K are meant; -1: the row has to be computed whole
    # (C,) L2 norm of what the row's entries differ by from its gradient; 0 of a row that is whole
    error: Tensor
    error_l1: Tensor  # (C,) L1 norm of the same
    expected_error: Tensor  # (C,) root of the mean of ``error ** 2`` over all samples
    # (C,) L2 norm of the row's gradient; that of a whole row leaves out entries above the cut
    norm: Tensor

    @staticmethod
    def empty(rows: int, slots: int, device: torch.device) -> Entries:
        """Return entries to be filled; what is not meant is 0."""
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
    """Return the (C, V) view of ``logits``' storage in which ``dlogits_`` may leave its result.

    16-bit results of fp32 logits lie in the first half of each row's bytes.
    """
    if out_dtype == logits.dtype:
        return logits
    assert (logits.dtype.itemsize, out_dtype.itemsize) == (4, 2), (logits.dtype, out_dtype)
    return logits.view(out_dtype)[:, : logits.shape[1]]


def row_blocks(logits: Tensor, elements: int) -> list[slice]:
    """Cut rows into ranges of a power of two, of about ``elements`` logits."""
    # so a tile of such a height is cut evenly: how a library adds up a row may depend on how many
    rows, columns = logits.shape
    step = 1 << (max(1, elements // max(columns, 1)).bit_length() - 1)
    return [slice(start, min(start + step, rows)) for start in range(0, max(rows, 1), step)]


def transformed(logits: Tensor, transform: Transform) -> tuple[Tensor, Tensor | None]:
    """Return the scores of (C, V) logits in the statistics dtype, and the softcap's tanh if any."""
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
    """Turn a (C, V) gradient by the scores into the one by the logits, in place."""
    gradient *= _per_row(transform.logit_scale / transform.temperature)
    if tanh is not None:
        gradient *= 1 - tanh * tanh
    return gradient


def _per_row(value: float | Tensor) -> float | Tensor:
    return value.unsqueeze(-1) if isinstance(value, Tensor) else value
