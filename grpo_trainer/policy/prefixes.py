"""Rows that begin alike, as the leaves of a tree."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefixes:
    """Rows in an order in which those of a branch are neighbors, the largest branch first.

    A run of neighbors has the tokens of its rows, less what each has in common with the one before.
    """

    rows: list[int]  # their numbers
    lengths: list[int]
    common: list[int]  # tokens in common with the row before; 0 for the first

    @classmethod
    def of(cls, rows: Sequence[list[int]]) -> Prefixes:
        """Order rows of token ids."""
        order = sorted(range(len(rows)), key=rows.__getitem__)
        neighbors = pairwise(rows[row] for row in order)
        common = [0, *(_in_common(one, other) for one, other in neighbors)]
        prefixes, runs = cls([], [], []), [(range(len(rows)), 0)]
        while runs:
            run, shared = runs.pop()
            if len(run) == 1:
                prefixes.rows.append(order[run[0]])
                prefixes.lengths.append(len(rows[order[run[0]]]))
                prefixes.common.append(shared)
                continue
            least = min(common[at] for at in run[1:])
            starts = [at for at in run[1:] if common[at] == least]
            branches = [range(*ends) for ends in pairwise([run.start, *starts, run.stop])]
            largest, *others = sorted(branches, key=len, reverse=True)
            runs += [(branch, least) for branch in reversed(others)]
            runs.append((largest, shared))
        return prefixes

    def take(self, rows: Collection[int]) -> Prefixes:
        """Return those of some rows."""
        taken = Prefixes([], [], [])
        wanted, common = {*rows}, 0
        for row, length, with_last in zip(self.rows, self.lengths, self.common, strict=True):
            common = min(common, with_last)
            if row in wanted:
                taken.rows.append(row)
                taken.lengths.append(length)
                taken.common.append(common)
                common = length
        return taken

    def runs(self, price: float, most: float = math.inf) -> list[range]:
        """Cut the rows into runs of at most ``most`` tokens, or one row, such that the sum of
        ``tokens + price * tokens**2`` over them is least."""
        least, starts = [0.0], [0]
        for stop in range(1, len(self.rows) + 1):
            tokens, shared = 0, 0
            choices: list[tuple[float, int]] = []
            for start in range(stop - 1, -1, -1):
                tokens += self.lengths[start] - shared
                if choices and tokens > most:
                    break
                choices.append((least[start] + tokens + price * tokens**2, start))
                shared = self.common[start]
                if not shared:
                    break
            cost, start = min(choices)
            least.append(cost)
            starts.append(start)
        runs, stop = [], len(self.rows)
        while stop:
            runs.append(range(starts[stop], stop))
            stop = starts[stop]
        return runs[::-1]

    def tokens(self, run: range) -> int:
        """Return how many a run has, those in common once."""
        return sum(self.lengths[at] for at in run) - sum(self.common[at] for at in run[1:])

    def elements(self, run: range, width: int) -> Tensor:
        """Return where its tokens stand in padded rows of ``width``, flattened."""
        parts = []
        for at in run:
            start, shared = self.rows[at] * width, 0 if at == run[0] else self.common[at]
            parts.append(torch.arange(start + shared, start + self.lengths[at]))
        return torch.cat(parts)

    def owners(self, runs: Sequence[range], width: int) -> Tensor:  # (B, width) int16
        """Return the row whose token stands for each element: the first of its run that begins
        like its row up to there."""
        owners = torch.arange(len(self.rows), dtype=torch.int16)[:, None].repeat(1, width)
        for run in runs:
            for at in run[1:]:
                own, shared = owners[self.rows[at]], self.common[at]
                own[:shared] = owners[self.rows[at - 1], :shared]
        return owners


def _in_common(one: list[int], other: list[int]) -> int:
    """Return how many tokens two rows begin with alike."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda at: one[: at + 1] != other[: at + 1])
