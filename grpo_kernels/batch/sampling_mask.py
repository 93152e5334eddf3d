"""SamplingMask: the ids that each token could be sampled from, in CSR form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.common import check_device, check_integers, kind_of

_MAX_VOCABULARY = 2**31  # so that row and id fit into one int64 key


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingMask:
    """The token ids that top-p, top-k or min-p sampling could choose from, for each of T rows.

    Rows are the elements of ``target.reshape(-1)``. A row's target always belongs to its ids, even
    if it is not listed, so a row without ids is a forced token with log-probability 0.

    Build one with the class methods, which sort the ids with one host transfer. A wrong shape,
    dtype, device or value is a ``ValueError`` that names the argument. If a rollout engine reports
    log-probabilities after its filters, use the ids with finite values.
    """

    indices: Tensor  # (N,) int64 ids, ascending and unique within a row
    offsets: Tensor  # (T + 1,) int64, the start of each row in ``indices``
    bounds: Tensor  # (T + 1,) int64, a copy on the CPU, so that slices need no transfer
    max_id: Tensor  # () int64 on the CPU, the largest id, to check the vocabulary size

    @classmethod
    def from_csr(cls, indices: Tensor, offsets: Tensor) -> SamplingMask:
        """Build a mask from CSR: ``indices`` (N,) and ``offsets`` o (T + 1,); row t has
        o[t]:o[t + 1].

        Both are int64 or int32 tensors on one device. An id that a row lists twice counts once.
        """
        check_integers("indices", indices, "(N,) integer tensor")
        check_integers("offsets", offsets, "(T + 1,) integer tensor", least=1)
        check_device("offsets", offsets, indices.device, "indices")
        offsets = offsets.long()
        steps = offsets.diff()
        count = indices.numel()
        ends = torch.stack([offsets[0], offsets[-1], (steps < 0).sum()]).tolist()
        if ends != [0, count, 0]:
            raise ValueError(
                f"offsets: expected values rising from 0 to N = {count}, got {ends[0]} to "
                f"{ends[1]}, falling at {ends[2]} of them"
            )
        rows = torch.repeat_interleave(steps, output_size=count)
        return _sorted(rows, indices.long(), steps.numel(), "indices")

    @classmethod
    def from_lists(
        cls, ids: Sequence[Sequence[int]], device: torch.device | str | None = None
    ) -> SamplingMask:
        """Build a mask from a sequence of ids per row."""
        tokens = list(chain.from_iterable(ids))
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool):
                raise ValueError(f"ids: expected integers, got {token!r}")
            if not 0 <= token < _MAX_VOCABULARY:
                raise ValueError(f"ids: expected token ids in [0, 2**31), got {token}")
        lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64, device=device)
        rows = torch.repeat_interleave(lengths, output_size=len(tokens))
        flat = torch.tensor(tokens, dtype=torch.int64, device=device)
        return _sorted(rows, flat, len(ids), "ids")

    @classmethod
    def from_padded(cls, ids: Tensor) -> SamplingMask:
        """Build a mask from (..., K) int64 or int32 ids of T rows, filled up with -1."""
        if not isinstance(ids, Tensor) or ids.dim() < 2:
            raise ValueError(f"ids: expected a (..., K) integer tensor, got {kind_of(ids)}")
        check_integers("ids", ids.reshape(-1), "integer tensor")
        flat = ids.reshape(-1, ids.shape[-1]).long()
        rows, columns = (flat != -1).nonzero(as_tuple=True)
        return _sorted(rows, flat[rows, columns], flat.shape[0], "ids")

    @property
    def num_rows(self) -> int:
        """T, the number of rows."""
        return self.bounds.numel() - 1

    @property
    def rows(self) -> Tensor:
        """(N,) the row of each id."""
        return torch.repeat_interleave(self.offsets.diff(), output_size=self.indices.numel())

    def take(self, index: slice | Tensor) -> SamplingMask:
        """Return the rows of a range, or of an int64 index, which needs one host transfer."""
        if isinstance(index, slice):
            bounds = self.bounds[index.start : index.stop + 1]
            first = int(bounds[0])
            end = int(bounds[-1])
            offsets = self.offsets[index.start : index.stop + 1] - first
            bounds = bounds - first
            return replace(self, indices=self.indices[first:end], offsets=offsets, bounds=bounds)
        counts = self.offsets.diff()[index]
        offsets = pad(counts.cumsum(0), (1, 0))
        bounds = offsets.cpu()
        count = int(bounds[-1])
        shifts = self.offsets[index] - offsets[:-1]
        source = torch.arange(count, device=index.device)
        source += torch.repeat_interleave(shifts, counts, output_size=count)
        return replace(self, indices=self.indices[source], offsets=offsets, bounds=bounds)

    def narrow(self, start: int, stop: int) -> SamplingMask:
        """Return the ids in [start, stop), minus ``start``. This needs two host transfers."""
        inside = (self.indices >= start) & (self.indices < stop)
        offsets = pad(inside.cumsum(0), (1, 0))[self.offsets]
        indices = self.indices[inside] - start
        return replace(self, indices=indices, offsets=offsets, bounds=offsets.cpu())


MASK_FIELDS = tuple(item.name for item in fields(SamplingMask))


def check_sampling_mask(sampling_mask: SamplingMask, target: Tensor) -> None:
    """Raise ValueError unless ``sampling_mask`` has a row for each element of ``target``."""
    mask = isinstance(sampling_mask, SamplingMask)
    if not mask or sampling_mask.num_rows != target.numel():
        got = f"{sampling_mask.num_rows} rows" if mask else type(sampling_mask).__name__
        raise ValueError(
            f"sampling_mask: expected a SamplingMask of {target.numel()} rows (one for each "
            f"target), got {got}"
        )
    check_device("sampling_mask", sampling_mask.indices, target.device, "target")


def _sorted(rows: Tensor, ids: Tensor, num_rows: int, name: str) -> SamplingMask:
    """Sort ids within their rows and drop duplicates, so each logit's gradient is added once."""
    ends = ids.aminmax() if ids.numel() else ids.new_zeros(2)
    lowest, max_id = torch.stack([*ends]).tolist()
    if lowest < 0 or max_id >= _MAX_VOCABULARY:
        wrong = lowest if lowest < 0 else max_id
        raise ValueError(f"{name}: expected token ids in [0, 2**31), got {wrong}")
    keys = torch.unique(rows * (max_id + 1) + ids)
    indices = keys % (max_id + 1)
    borders = torch.arange(num_rows + 1, device=ids.device) * (max_id + 1)
    offsets = torch.searchsorted(keys, borders)
    return SamplingMask(
        indices=indices, offsets=offsets, bounds=offsets.cpu(), max_id=torch.tensor(max_id)
    )
