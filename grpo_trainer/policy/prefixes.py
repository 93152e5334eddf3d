"""Rows with common prefixes, as the leaves of a tree."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prefixes:
    """Rows in an order in which the rows of a branch are neighbors.

    A run of neighbors has the tokens of its rows, without each row's prefix shared with the
    previous row.
    """

    rows: list[int]  # their indices
    lengths: list[int]
    common: list[int]  # tokens in common with the previous row; 0 for the first

    @classmethod
    def of(cls, rows: Sequence[list[int]]) -> Prefixes:
        """Sort rows of token ids."""
        order = sorted(range(len(rows)), key=rows.__getitem__)
        neighbors = pairwise(rows[row] for row in order)
        return cls(
            rows=order,
            lengths=[len(rows[row]) for row in order],
            common=[0, *(_in_common(one, other) for one, other in neighbors)],
        )

    def take(self, rows: Collection[int]) -> Prefixes:
        """Return the prefixes of some rows, in the same order."""
        places = sorted(self._places[row] for row in rows)
        least = [min(self.common[one + 1 : other + 1]) for one, other in pairwise(places)]
        return self._ordered(places, [0, *least])

    def largest_first(self) -> Prefixes:
        """Order the rows so that the largest branch comes first, also within each branch.

        The order of these rows does not depend on other rows in the original sort.
        """
        places: list[int] = []
        common: list[int] = []
        branches = [(range(len(self.rows)), 0)]  # each with its prefix shared with the previous row
        while branches:
            branch, shared = branches.pop()
            if len(branch) == 1:
                places += branch
                common.append(shared)
                continue
            least = min(self.common[branch.start + 1 : branch.stop])
            starts = [place for place in branch[1:] if self.common[place] == least]
            parts = [range(*ends) for ends in pairwise([branch.start, *starts, branch.stop])]
            largest, *others = sorted(parts, key=len, reverse=True)
            branches += [(part, least) for part in reversed(others)]
            branches.append((largest, shared))
        return self._ordered(places, common)

    def _ordered(self, places: Sequence[int], common: list[int]) -> Prefixes:
        rows = [self.rows[place] for place in places]
        return Prefixes(rows, [self.lengths[place] for place in places], common)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {row: place for place, row in enumerate(self.rows)}

    def runs(self, price: float, most: float = math.inf) -> list[range]:
        """Split the rows into runs of at most ``most`` tokens, or one row, that minimize the sum of
        ``tokens + price * tokens**2``."""
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
        """Return the tokens of a run, with shared tokens counted once."""
        return sum(self.lengths[at] for at in run) - sum(self.common[at] for at in run[1:])

    def elements(self, run: range, width: int) -> Tensor:
        """Return the places of its tokens in flattened padded rows of ``width``."""
        parts = []
        for at in run:
            start, shared = self.rows[at] * width, 0 if at == run[0] else self.common[at]
            parts.append(torch.arange(start + shared, start + self.lengths[at]))
        return torch.cat(parts)

    def owners(self, runs: Sequence[range], width: int) -> Tensor:  # (B, width) int16
        """Return the row whose token represents each element: the first row of its run with the
        same prefix up to there."""
        owners = torch.arange(len(self.rows), dtype=torch.int16)[:, None].repeat(1, width)
        for run in runs:
            for at in run[1:]:
                own, shared = owners[self.rows[at]], self.common[at]
                own[:shared] = owners[self.rows[at - 1], :shared]
        return owners


def _in_common(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix of two rows."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda at: one[: at + 1] != other[: at + 1])
