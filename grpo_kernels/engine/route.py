"""Which forward a head takes: settled by what its arguments are, never by the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.base import FormsLogits, LinearStats
from grpo_kernels.backends.registry import Choice, choose_backend, chunk_rows
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.engine.sweep import Execution
from grpo_kernels.engine.topk import UNRANKED, Ranking
from grpo_kernels.head.head import Head, logits_dtype

# Tiles of a fixed height are filled up, so that a few rows cost as much as all of them: these are
# the fewest at which the products still run near their full speed.
_FIXED_ROWS_CPU = 256
_FIXED_ROWS_GPU = 1024
# With fewer rows, CPU libraries take other kernels for the last few of them.
_FEWEST_FIXED_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class Path:
    """Backend, forward and tile of a head."""

    choice: Choice
    precision: str
    tile_rows: int
    batch_invariant: bool
    linear_stats: LinearStats | None  # the forward without a tile of logits, where there is one

    @staticmethod
    def of(
        choice: Choice,
        hidden: Tensor,  # (T, D)
        head: Head,
        precision: str,
        tile_rows: int,
        *,
        batch_invariant: bool,
        sampling_mask: bool,
        ranked: bool = False,
    ) -> Path:
        """The path with a tile that is already known.

        Scores of a ``sampling_mask``, and what is ``ranked`` (the target, the top k), are read
        from a tile.
        """
        tiled = sampling_mask or ranked or choice.backend.kernels is None
        return Path(
            choice=choice,
            precision=precision,
            tile_rows=tile_rows,
            batch_invariant=batch_invariant,
            linear_stats=None if tiled else choice.linear_stats(hidden, head, precision),
        )

    @property
    def fixed_rows(self) -> int | None:
        """The height to which every tile is filled up; None where that is not needed."""
        return self.tile_rows if self.batch_invariant and self.linear_stats is None else None

    def keeps_bits_in_one_pass(self, hidden: Tensor) -> bool:
        """Whether a tile made for its gradient has the statistics of the forward, bit for bit."""
        if self.linear_stats is None:
            return True  # both are that tile
        kernels = self.choice.kernels()
        logits = logits_dtype(hidden.dtype, self.precision)
        return isinstance(kernels, FormsLogits) and kernels.forms(hidden.dtype, logits)

    def execution(
        self,
        chunks: Sequence[slice],
        extras: bool = False,
        sampling_mask: SamplingMask | None = None,
        ranking: Ranking = UNRANKED,
    ) -> Execution:
        """The loop over ``chunks`` of rows."""
        return Execution(
            self.choice.kernels(),
            chunks,
            self.precision,
            extras,
            self.linear_stats,
            sampling_mask,
            ranking,
            self.fixed_rows,
        )


def choose_path(
    backend: str,
    hidden: Tensor,  # (T, D)
    head: Head,
    precision: str,
    max_workspace_bytes: int | None = None,
    *,
    batch_invariant: bool = False,
    sampling_mask: bool = False,
    ranked: bool = False,
) -> Path:
    """The path of a head's arguments.

    Raises:
        ValueError: the backend cannot run, or not as asked for; the workspace is too small.
    """
    choice = choose_backend(backend, hidden.device, hidden.dtype)
    columns = head.weight.shape[0]
    rows = chunk_rows(columns, hidden.dtype, precision, hidden.device, max_workspace_bytes)
    if batch_invariant:
        rows = _fixed_rows(choice, hidden.device, rows, max_workspace_bytes)
    return Path.of(
        choice,
        hidden,
        head,
        precision,
        rows,
        batch_invariant=batch_invariant,
        sampling_mask=sampling_mask,
        ranked=ranked,
    )


def _fixed_rows(choice: Choice, device: torch.device, fit: int, workspace: int | None) -> int:
    """A power of two, so that blocks of a tile's rows are all alike."""
    if choice.backend.kernels is None:
        raise ValueError(
            f"batch_invariant: expected False with backend {choice.backend.name!r}, which "
            "multiplies all rows at once, got True"
        )
    if fit < _FEWEST_FIXED_ROWS:
        raise ValueError(
            f"max_workspace_bytes: expected room for {_FEWEST_FIXED_ROWS} rows of logits with "
            f"batch_invariant, got {workspace} ({fit} rows)"
        )
    most = _FIXED_ROWS_CPU if device.type == "cpu" else _FIXED_ROWS_GPU
    return 1 << (min(fit, most).bit_length() - 1)
