"""The row-kernel interface: what a backend must provide on top of matrix products.

A row kernel sees one tile of raw logits (C rows, V columns) and knows nothing of losses. It turns
the tile into per-row statistics, and, given the gradients of those statistics, into the gradient of
the tile, in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_kernels.head.head import Head


@dataclass(frozen=True)
class Transform:
    """Logits to the distribution's scores: ``z = softcap * tanh(scale * logit / softcap) / T``.

    Without ``softcap``, ``z = scale * logit / T``. ``temperature`` is a float, or a ``(C,)`` tensor
    of the statistics dtype with one value per row.
    """

    logit_scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0

    def rows(self, index: slice | Tensor) -> Transform:
        """The same transform for a subset of the rows."""
        if not isinstance(self.temperature, Tensor):
            return self
        return Transform(self.logit_scale, self.softcap, self.temperature[index])


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
    masked_logp: Tensor | None = None  # (C,) logp renormalised over a sampling mask
    rank: Tensor | None = None  # (C,) int64, how many columns come before the target
    topk_logp: Tensor | None = None  # (C, k) log-probabilities of the first k columns
    topk_indices: Tensor | None = None  # (C, k) int64, which these are

    def rows(self, index: slice | Tensor) -> RowStats:
        """The same for a subset of the rows."""
        return RowStats(*(x[index] if x is not None else None for x in self))  # type: ignore[arg-type]


_DTYPES = {
    "is_top1": torch.bool,
    "lse": torch.float64,
    "rank": torch.int64,
    "topk_indices": torch.int64,
}
# what a backend fills on request, all or none
EXTRAS = ("is_top1", "sum_sq_probs", "max_logit", "min_logit")


def dtype_of(name: str, wide: torch.dtype) -> torch.dtype:
    """The dtype of a field of :class:`RowStats`, ``wide`` that of most."""
    return _DTYPES.get(name, wide)


def shapes_of(
    rows: torch.Size, *, extras: bool, sampling_mask: bool, rank: bool, top_k: int
) -> dict[str, torch.Size]:
    """The fields of :class:`RowStats` that a call fills, and their shapes."""
    names = ("logp", "entropy", "lse", *(EXTRAS if extras else ()))
    shapes = dict.fromkeys(names, rows)
    if sampling_mask:
        shapes["masked_logp"] = rows
    if rank:
        shapes["rank"] = rows
    if top_k:
        shapes["topk_logp"] = shapes["topk_indices"] = torch.Size((*rows, top_k))
    return shapes


def concatenate(parts: list[RowStats]) -> RowStats:
    """The statistics of consecutive row ranges as one; ``parts`` is not empty."""
    columns = ([part[i] for part in parts] for i in range(len(RowStats._fields)))
    return RowStats(*(torch.cat(column) if column[0] is not None else None for column in columns))  # type: ignore[arg-type]


class RowKernels(Protocol):
    """One backend's passes over a tile of logits."""

    def stats(self, logits: Tensor, target: Tensor, transform: Transform, extras: bool) -> RowStats:
        """Statistics of ``logits`` (C, V) for ``target`` (C,); the tile is left as it is."""
        ...

    def dlogits_(
        self,
        logits: Tensor,
        target: Tensor,
        transform: Transform,
        stats: RowStats,
        dlogp: Tensor,
        dentropy: Tensor | None,
        out_dtype: torch.dtype,
    ) -> Tensor:
        """Gradient with respect to the raw logits, written into their storage.

        With ``p = exp(z - lse)`` and ``H`` the entropy,
        ``dz_j = dlogp (1[j = y] - p_j) - dentropy p_j (log p_j + H)``.

        Returns a (C, V) tensor of ``out_dtype``. A 16-bit result of fp32 logits lives in the first
        half of each row's bytes, so its row stride is twice that of ``logits``.
        """
        ...


@runtime_checkable
class RowMiddle(Protocol):
    """What happens between statistics and gradient, where it runs inside the row kernel."""

    def gradient_(
        self,
        rows: slice,
        logits: Tensor,
        target: Tensor,
        transform: Transform,
        out_dtype: torch.dtype,
    ) -> tuple[RowStats, Tensor]:
        """As ``stats`` and ``dlogits_`` of :class:`RowKernels`, for the range ``rows`` of all."""
        ...


@runtime_checkable
class FormsLogits(Protocol):
    """Row kernels that also form the tile of logits, along with its statistics.

    A row's bits then depend on that row alone.
    """

    def forms(self, dtype: torch.dtype, logits_dtype: torch.dtype) -> bool:
        """Whether they form such logits of inputs of ``dtype``."""
        ...

    def logits_stats(
        self, hidden: Tensor, head: Head, target: Tensor, extras: bool, out: Tensor
    ) -> RowStats:
        """Fills ``out`` (C, V) with the raw logits of ``hidden`` (C, D) before ``head``."""
        ...


class LinearStats(Protocol):
    """One backend's forward without a tile of logits."""

    def __call__(
        self, hidden: Tensor, head: Head, target: Tensor, precision: str, extras: bool
    ) -> RowStats:
        """Statistics of the rows of ``hidden`` (T, D) before ``head`` for ``target`` (T,)."""
        ...


# A log-probability of less is as good as -inf, whose probability is 0 in every dtype; unlike the
# smallest fp32 it can be multiplied by a gradient before the probability, 0, is.
LEAST_LOGP = -1e4


def stats_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, losses and metrics: fp32, or fp64 for fp64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def output_view(logits: Tensor, out_dtype: torch.dtype) -> Tensor:
    """The (C, V) view of ``logits``' storage in which ``dlogits_`` leaves its result."""
    if out_dtype == logits.dtype:
        return logits
    rows, columns = logits.shape
    ratio = logits.element_size() // out_dtype.itemsize
    row_stride = logits.stride(0) * ratio
    offset = logits.storage_offset() * ratio
    flat = torch.empty(0, dtype=out_dtype, device=logits.device)
    return flat.set_(logits.untyped_storage(), offset, (rows, columns), (row_stride, 1))


# On a CPU oneDNN reads the columns of a 16-bit matrix in steps of so many, and multiplies those
# past the end by zero. One that looks like an infinity or a NaN would spoil its row.
_CPU_COLUMNS = 32


def clear_row_ends(dlogits: Tensor) -> None:
    """Zeroes what lies behind the last column of each row, as far as a product may read it.

    Behind narrowed rows lie halves of the fp32 logits, which look like anything.
    """
    (rows, columns), stride = dlogits.shape, dlogits.stride(0)
    end = min(stride, -columns % _CPU_COLUMNS + columns)
    if dlogits.device.type == "cpu" and rows and end > columns:
        first = dlogits.storage_offset() + columns
        dlogits.as_strided((rows, end - columns), (stride, 1), first).zero_()


def with_clear_row_ends(x: Tensor) -> Tensor:
    """(M, K) ``x``, or a copy whose rows end in zeros where a product would read the next row."""
    columns = x.shape[1]
    if x.device.type != "cpu" or x.element_size() != 2 or columns % _CPU_COLUMNS == 0:
        return x
    return torch.nn.functional.pad(x, (0, -columns % _CPU_COLUMNS))[:, :columns]
