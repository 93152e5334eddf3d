"""Log-probabilities renormalized over a sampling mask, computed from a tile of logits.

``log p[y] - log(sum_{j in S} p_j)`` equals ``z_y - logsumexp_{j in S}(z_j)``. The second form needs
no statistic of the whole row. It does not cancel if the mask holds nearly all of the mass, does not
underflow if it holds nearly none, and is exactly 0 if the target is the only member. It is
evaluated in fp64, which is negligible compared with a GEMM over the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import WHOLE, Entries, Tile, slope, transformed
from grpo_kernels.batch import SamplingMask
from grpo_kernels.head import VocabShard


def scores_at(tile: Tile, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return (N,) transformed logits in fp64, and their derivatives with respect to raw logits."""
    picked = tile.logits[rows, columns].double().unsqueeze(-1)
    transform = tile.transform.rows(rows)
    values, tanh = transformed(picked, transform)
    slopes = slope(torch.ones_like(picked), transform, tanh)
    return values.squeeze(-1), slopes.squeeze(-1)


class MaskedRows(NamedTuple):
    """The mask's ids in a tile's C rows, and everything that their gradient needs later."""

    ids: Tensor  # (N,)
    rows: Tensor  # (N,)
    others: Tensor  # (N,) fp64: share of the mask's mass times the slope; 0 for the target
    target: Tensor  # (C,)
    target_slope: Tensor  # (C,) fp64
    logprobs: Tensor  # (C,) fp64, of the targets

    @staticmethod
    def of(tile: Tile, sampling_mask: SamplingMask, shard: VocabShard | None = None) -> MaskedRows:
        """Build it from a tile of raw logits and the sampling mask of the same rows.

        With a ``shard`` of the vocabulary, the mask has this rank's ids.
        """
        target = tile.target
        ids = sampling_mask.indices
        rows = sampling_mask.rows
        lengths = sampling_mask.offsets.diff()
        all_rows = _all_rows(target)

        def reduced(how: str, values: Tensor, initial: float) -> Tensor:
            # as a matrix with one column: a GPU then reduces each row's values one by one, in the
            # order of the ids, so the result depends on nothing else
            column = values.unsqueeze(-1)
            return torch.segment_reduce(
                column, how, lengths=lengths, unsafe=True, initial=initial
            ).squeeze(-1)

        is_target = ids == target[rows]
        mine = None if shard is None else shard.owns(target)
        if mine is not None:
            target = torch.where(mine, target, 0)
        score, target_slope = scores_at(tile, all_rows, target)
        if mine is not None:
            score = torch.where(mine, score, -torch.inf)
            target_slope = torch.where(mine, target_slope, 0.0)
        scores, slopes = scores_at(tile, rows, ids)
        scores = scores.masked_fill(is_target, -torch.inf)  # the target is added below
        peak = torch.maximum(reduced("max", scores, -torch.inf), score)
        if shard is not None:
            score, peak = shard.gather(torch.stack([score, peak])).amax(0)
        others = (scores - peak[rows]).exp()
        sums = reduced("sum", others, 0.0)
        if shard is not None:
            sums = shard.gather(sums).sum(0)
        # the mass relative to the peak, minus 1: accurate for a mass barely above 1
        excess = sums + torch.expm1(score - peak)
        others = others / (1 + excess)[rows] * slopes
        return MaskedRows(
            ids=ids,
            rows=rows,
            others=others,
            target=target,
            target_slope=target_slope,
            logprobs=score - peak - excess.log1p(),
        )

    def entries(self, slots: int, dtype: torch.dtype) -> Entries:
        """Return all entries of the gradients of the log-probabilities, without an error.

        A row with more than ``slots`` entries is whole.
        """
        rows = len(self.target)
        counts = torch.bincount(self.rows, minlength=rows)
        place = torch.arange(len(self.ids), device=self.ids.device)
        place -= (counts.cumsum(0) - counts)[self.rows]
        here = self.target_slope != 0  # otherwise the target is in another rank's columns
        used = counts + here
        fits = used <= slots
        ids = self.target.new_zeros((rows, slots), dtype=torch.int32)
        values = self.others.new_zeros((rows, slots))
        listed = fits[self.rows]
        index = self.rows[listed], place[listed]
        ids[index] = self.ids[listed].int()
        values[index] = -self.others[listed]
        last = _all_rows(self.target)[fits & here]
        at_target = -torch.expm1(self.logprobs) * self.target_slope
        ids[last, counts[last]] = self.target[last].int()
        values[last, counts[last]] = at_target[last]
        norm = at_target.square().index_add(0, self.rows, self.others.square()).sqrt()
        none = torch.zeros(rows, dtype=dtype, device=ids.device)
        return Entries(
            ids=ids,
            values=values.to(dtype),
            used=torch.where(fits, used, WHOLE).int(),
            error=none,
            error_l1=none,
            expected_error=none,
            norm=norm.to(dtype),
        )

    def select(self, index: Tensor) -> MaskedRows:
        """Return the same for a tile with only the rows ``index`` (n,) int64."""
        places = torch.full_like(self.target, -1)
        places[index] = _all_rows(index)
        left = places[self.rows] >= 0
        return MaskedRows(
            ids=self.ids[left],
            rows=places[self.rows[left]],
            others=self.others[left],
            target=self.target[index],
            target_slope=self.target_slope[index],
            logprobs=self.logprobs[index],
        )

    def add_gradient_(self, dlogits: Tensor, dmasked: Tensor) -> None:
        """Add ``dmasked (1[j = y] - 1[j in S] p_j / mass)``, times the slope, to (C, V) dlogits.

        Each logit is read and written once, so the result does not depend on an order.
        """
        dmasked = dmasked.double()
        of_target = dmasked * -torch.expm1(self.logprobs) * self.target_slope
        for rows, ids, gradient in (
            (self.rows, self.ids, -dmasked[self.rows] * self.others),
            (_all_rows(self.target), self.target, of_target),
        ):
            gradient += dlogits[rows, ids].double()
            dlogits[rows, ids] = gradient.to(dlogits.dtype)


def _all_rows(of: Tensor) -> Tensor:
    return torch.arange(of.numel(), device=of.device)
