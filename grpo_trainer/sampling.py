"""The order in which prompts are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler


class RepeatSampler(Sampler[int]):
    """Draws whole generation batches, each prompt repeated for its group.

    With ``prompts_per_batch`` 2, ``group_size`` 3 and ``repeats`` 2 the indices begin like
    ``7 7 7 1 1 1  7 7 7 1 1 1  4 4 4 ...``. The order depends on ``seed`` and the epoch only, so it
    is the same on every process and after a resume. Prompts that do not fill a last batch are
    left for another epoch.

    Args:
        size: number of prompts.
        group_size: consecutive repetitions of a prompt.
        prompts_per_batch: different prompts of a generation batch.
        repeats: how often a generation batch is given out.
        seed: of the shuffling; None: dataset order.
        epoch: called at the start of each pass.
    """

    def __init__(
        self,
        size: int,
        group_size: int,
        *,
        prompts_per_batch: int = 1,
        repeats: int = 1,
        seed: int | None = None,
        epoch: Callable[[], int] = lambda: 0,
    ) -> None:
        self.size = size
        self.group_size = group_size
        self.prompts_per_batch = prompts_per_batch
        self.repeats = repeats
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        for start in range(0, self._whole(), self.prompts_per_batch):
            batch = order[start : start + self.prompts_per_batch]
            for _ in range(self.repeats):
                for index in batch:
                    yield from [index] * self.group_size

    def __len__(self) -> int:
        return self._whole() * self.group_size * self.repeats

    def _whole(self) -> int:
        return self.size - self.size % self.prompts_per_batch

    def _order(self) -> list[int]:
        if self.seed is None:
            return list(range(self.size))
        generator = torch.Generator()
        # consecutive seeds are fine: the generator mixes its seed
        generator.manual_seed(self.seed + self.epoch())
        return torch.randperm(self.size, generator=generator).tolist()
