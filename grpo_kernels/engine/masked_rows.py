"""Log-probabilities renormalised over a sampling mask, read from a tile of logits.

``log p[y] - log(sum_{j in S} p_j)`` is ``z_y - logsumexp_{j in S}(z_j)``. The second form needs no
statistic of the whole row: nothing cancels where the mask holds nearly all of the mass, nothing
underflows where it holds nearly none, and it is exactly 0 where the target is the only member. It
is evaluated in fp64, which costs nothing beside a GEMM over the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends import Tile, slope, transformed
from grpo_kernels.batch import SamplingMask
from grpo_kernels.head import Transform, VocabShard


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Some logits of a tile after the transform."""

    values: Tensor  # (N,) fp64
    slopes: Tensor  # (N,) fp64, their derivative by the raw logit

    @staticmethod
    def at(logits: Tensor, transform: Transform, rows: Tensor, columns: Tensor) -> Scores:
        picked = logits[rows, columns].double().unsqueeze(-1)
        of_rows = transform.rows(rows)
        values, tanh = transformed(picked, of_rows)
        slopes = slope(torch.ones_like(picked), of_rows, tanh)
        return Scores(values=values.squeeze(-1), slopes=slopes.squeeze(-1))

    def where(self, there: Tensor) -> Scores:
        """Return the same where they are ``there`` (N,), else scores of -inf."""
        return Scores(
            values=torch.where(there, self.values, -torch.inf),
            slopes=torch.where(there, self.slopes, 0.0),
        )


@dataclass(frozen=True, kw_only=True)
class MaskedRows:
    """The ids of a tile's C rows, with what their gradient needs once the logits are gone."""

    ids: Tensor  # (N,)
    rows: Tensor  # (N,)
    others: Tensor  # (N,) fp64: an id's share of the mask's mass times its slope, 0 for the target
    target: Tensor  # (C,)
    target_slope: Tensor  # (C,) fp64
    logp: Tensor  # (C,) fp64, the log-probability of the target

    @staticmethod
    def of(tile: Tile, sampling_mask: SamplingMask, shard: VocabShard | None = None) -> MaskedRows:
        """Make one from a tile of raw logits and the sampling mask of the same rows.

        Of a ``shard`` of the vocabulary, the mask has this rank's ids.
        """
        logits, target, transform = tile
        ids, rows = sampling_mask.indices, sampling_mask.rows
        all_rows = torch.arange(target.numel(), device=target.device)
        is_target = ids == target[rows]
        mine = None if shard is None else shard.owns(target)
        if mine is not None:
            target = torch.where(mine, target, 0)
        own = Scores.at(logits, transform, all_rows, target)
        if mine is not None:
            own = own.where(mine)
        listed = Scores.at(logits, transform, rows, ids)
        scores = listed.values.masked_fill(is_target, float("-inf"))  # it is added below
        score = own.values
        peak = torch.maximum(_reduce("max", scores, sampling_mask, float("-inf")), score)
        if shard is not None:
            score, peak = shard.gather(torch.stack([score, peak])).amax(0)
        others = (scores - peak[rows]).exp()
        sums = _reduce("sum", others, sampling_mask, 0.0)
        if shard is not None:
            sums = shard.gather(sums).sum(0)
        # the mass in units of the peak's, less 1: nothing is lost of a mass that is hardly over 1
        excess = sums + torch.expm1(score - peak)
        return MaskedRows(
            ids=ids,
            rows=rows,
            others=others / (1 + excess)[rows] * listed.slopes,
            target=target,
            target_slope=own.slopes,
            logp=score - peak - excess.log1p(),
        )

    def at(self, order: Tensor) -> MaskedRows:
        """Return the same for a tile that holds the rows ``order`` (n,) of this one."""
        places = torch.full_like(self.target, -1)
        places[order] = torch.arange(order.numel(), device=order.device)
        left = places[self.rows] >= 0
        return MaskedRows(
            ids=self.ids[left],
            rows=places[self.rows[left]],
            others=self.others[left],
            target=self.target[order],
            target_slope=self.target_slope[order],
            logp=self.logp[order],
        )

    def add_gradient_(self, dlogits: Tensor, dmasked: Tensor) -> None:
        """Add ``dmasked (1[j = y] - 1[j in S] p_j / mass)``, by the raw logits, to (C, V) dlogits.

        Each logit is read and written once, so no addition can come before another.
        """
        dmasked = dmasked.double()
        gradient = -dmasked[self.rows] * self.others
        gradient += dlogits[self.rows, self.ids].double()
        dlogits[self.rows, self.ids] = gradient.to(dlogits.dtype)
        own = torch.arange(self.target.numel(), device=self.target.device)
        gradient = dmasked * -torch.expm1(self.logp) * self.target_slope
        gradient += dlogits[own, self.target].double()
        dlogits[own, self.target] = gradient.to(dlogits.dtype)


def _reduce(how: str, values: Tensor, sampling_mask: SamplingMask, initial: float) -> Tensor:
    """Return (C,) sums or maxima of the (N,) ``values`` of each row, in the order of the ids.

    As a matrix of one column: a GPU then walks through each row's values one by one, so that the
    result depends on nothing else.
    """
    column = values.unsqueeze(-1)
    lengths = sampling_mask.offsets.diff()
    reduced = torch.segment_reduce(column, how, lengths=lengths, unsafe=True, initial=initial)
    return reduced.squeeze(-1)
