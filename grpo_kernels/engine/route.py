"""Which forward a head uses, decided by its arguments and never by the number of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from grpo_kernels.backends import Backend, choose_backend, chunk_rows
from grpo_kernels.engine.options import RunOptions
from grpo_kernels.head import Head, VocabShard, logits_dtype

# Tiles of a fixed height are padded, so that a few rows cost as much as a full tile: these are the
# smallest heights at which GEMMs still run near their full speed.
_FIXED_ROWS_CPU = 256
_FIXED_ROWS_GPU = 1024
# With fewer rows, CPU libraries use other kernels for the last few of them.
_FEWEST_FIXED_ROWS = 16
_FEWER_ROWS = 4  # after an out-of-memory error, a tile has this many times fewer rows


@dataclass(frozen=True, kw_only=True)
class Route:
    """Backend, forward and tile of a head."""

    backend: Backend
    options: RunOptions
    dtype: torch.dtype  # of the hidden states
    device: torch.device
    columns: int  # ids in the weight
    tile_rows: int
    logits_rows: int  # rows of a backward's tile, which always has logits
    has_tile: bool  # False: statistics are computed without a tile of logits
    stores: bool  # a GEMM can store exponentials, so :meth:`storing` may be used
    # the tile holds exponentials of logits in the dtype of the hidden states, written by the GEMM
    # of the logits along with the statistics of its rows
    exponentials: bool = False
    shard: VocabShard | None = None  # which ids the columns are; None: all

    @property
    def max_local_vocab(self) -> int:
        """The largest number of columns on a rank: all ranks use it to cut rows in the same way."""
        return self.columns if self.shard is None else self.shard.max_local_vocab

    @property
    def precision(self) -> str:
        return self.options.precision

    @property
    def logits(self) -> torch.dtype:
        """The dtype of the logits."""
        return logits_dtype(self.dtype, self.precision)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the tile."""
        return self.max_local_vocab * self.tile_dtype.itemsize

    @property
    def tile_dtype(self) -> torch.dtype:
        """The dtype of the tile."""
        return self.dtype if self.exponentials else self.logits

    @property
    def reads_once(self) -> bool:
        """Whether the gradient of log-probabilities can be computed along with their statistics."""
        return self.dtype in self.backend.logp_gradients and self.shard is None

    @property
    def block(self) -> int:
        """Rows of a GEMM's block: chunks are multiples of it."""
        return 16 if self.device.type == "cpu" else 256

    @property
    def fixed_rows(self) -> int | None:
        """The height to which every tile is padded; None if that is not needed."""
        fixed = self.options.batch_invariant and self.has_tile
        return self.tile_rows if fixed else None

    @property
    def advice(self) -> str:
        """The setting that gives this tile."""
        return f"max_workspace_bytes={self.tile_rows * self.row_bytes}"

    @property
    def why_no_gradients(self) -> str | None:
        """Why no forward of this route can also compute gradients; None if one can."""
        if not self.backend.has_tiles:
            return "the eager reference stores all logits, and leaves their gradients to autograd"
        # statistics are equal bit for bit only if the forward uses the same tile as the gradients
        if self.options.batch_invariant and not (self.has_tile or self.forms_logits):
            return "the batch-invariant forward computes no logits to derive gradients from"
        return None

    @property
    def forms_logits(self) -> bool:
        """Whether the backend computes the logits of a tile; False: a library's GEMM does."""
        return self.backend.forms_logits(self.dtype, self.logits)

    def storing(self, fewest: int = 0) -> Route:
        """Return the same route with exponentials in its tile, of at least ``fewest`` rows.

        ``max_workspace_bytes`` limits the tile.
        """
        stored = replace(self, exponentials=True)
        workspace = self.options.max_workspace_bytes
        if workspace is None:
            more = self.logits.itemsize // stored.tile_dtype.itemsize
            return replace(stored, tile_rows=max(self.tile_rows * more, fewest))
        return replace(stored, tile_rows=max(1, workspace // stored.row_bytes))

    def tiled(self) -> Route:
        """Return the same route for a backward, which always has a tile, of any height."""
        options = replace(self.options, batch_invariant=False)
        rows = self.logits_rows
        return replace(self, has_tile=True, exponentials=False, tile_rows=rows, options=options)

    def smaller(self) -> Route | None:
        """Return a route with a smaller tile; None if there is none or it changes a row's bits.

        None also for a shard of the vocabulary: the other ranks would not know about the change.
        """
        rows = self.tile_rows // _FEWER_ROWS
        fixed = not self.has_tile or self.fixed_rows is not None
        if not rows or fixed or self.shard is not None:
            return None
        fewer = max(1, self.logits_rows // _FEWER_ROWS)
        return replace(self, tile_rows=rows, logits_rows=fewer)


def choose_route(
    dtype: torch.dtype,  # of the hidden states
    head: Head,
    options: RunOptions,
    tiled: bool = False,  # some outputs are read from a tile of logits
) -> Route:
    """Choose the route of a head.

    Raises:
        ValueError: the backend cannot run as requested, or the workspace is too small.
    """
    device = head.weight.device
    backend = choose_backend(options.backend, device, dtype)
    columns = head.weight.shape[0]
    workspace = options.max_workspace_bytes
    shard = head.shard
    if shard is not None:
        if not backend.has_tiles:
            raise ValueError(
                f"backend: expected one with vocab_shard support, got {backend.name!r}"
            )
        columns = shard.max_local_vocab
    rows = chunk_rows(
        columns=columns,
        dtype=dtype,
        precision=options.precision,
        device=device,
        max_workspace_bytes=workspace,
    )
    if options.batch_invariant:
        rows = _fixed_rows(backend, device, rows, workspace)
    has_tile = tiled or not backend.has_linear_stats(dtype, head, options.precision)
    return Route(
        backend=backend,
        options=options,
        dtype=dtype,
        device=device,
        columns=head.weight.shape[0],
        shard=shard,
        tile_rows=rows,
        logits_rows=rows,
        has_tile=has_tile,
        stores=shard is None
        and not options.batch_invariant
        and backend.has_linear_gradient(dtype, head, options.precision),
    )


def _fixed_rows(backend: Backend, device: torch.device, fit: int, workspace: int | None) -> int:
    """Return a power of two, so that all blocks of a tile's rows have the same size."""
    if not backend.has_tiles:
        raise ValueError(
            f"batch_invariant: expected False with backend {backend.name!r}, which multiplies all "
            "rows at once, got True"
        )
    if fit < _FEWEST_FIXED_ROWS:
        raise ValueError(
            f"max_workspace_bytes: expected room for {_FEWEST_FIXED_ROWS} rows of logits with "
            f"batch_invariant, got {workspace} ({fit} rows)"
        )
    most = _FIXED_ROWS_CPU if device.type == "cpu" else _FIXED_ROWS_GPU
    return 1 << (min(fit, most).bit_length() - 1)
