"""Metrics as mergeable statistics: not made before somebody reads them, and left on the device."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.arguments import check_name
from grpo_kernels.batch import Segments, TokenBatch

# name -> (kind, values): what a surrogate reports, see `indicator_stats` for the kinds
Indicators = dict[str, tuple[str, Tensor]]


class _Kind(NamedTuple):
    merge: Callable[[Tensor], Tensor]  # (n, ...) stacked totals -> (...)
    value: Callable[[Tensor, Tensor], Tensor]  # total, count -> ()
    neutral: float = 0.0  # a total that changes none


def _sum(stacked: Tensor) -> Tensor:
    return stacked.sum(0)


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


def _total(total: Tensor, count: Tensor) -> Tensor:
    return total


_KINDS: dict[str, _Kind] = {
    "mean": _Kind(_sum, _ratio),
    "sum": _Kind(_sum, _total),
    # a norm over another: the square roots of sums of squares
    "norm_ratio": _Kind(_sum, lambda total, count: torch.sqrt(total / count)),
    "min": _Kind(lambda stacked: stacked.amin(0), _total, torch.inf),
    "max": _Kind(lambda stacked: stacked.amax(0), _total, -torch.inf),
    # exp of the mean negative log-probability
    "perplexity": _Kind(_sum, lambda total, count: torch.exp(-_ratio(total, count))),
    # (sum r)^2 / (n sum r^2), the effective share of samples
    "ess": _Kind(_sum, lambda total, count: total[0] ** 2 / (count * total[1]).clamp(min=1e-30)),
}


@dataclass(frozen=True)
class Stat:
    """A statistic that can be merged over chunks, micro-batches and processes."""

    kind: str
    total: Tensor  # () or, for "ess", (2,)
    count: Tensor  # () number of samples; 0: nothing to report

    def value(self) -> Tensor:
        """Return the metric, (), fp32; NaN where no sample contributed."""
        value = _KINDS[self.kind].value(self.total, self.count)
        return torch.where(self.count > 0, value, torch.nan).float()


class Metrics:
    """By a metric's name its () value, detached and still on the device; read-only.

    It has a mapping's methods and is no ``Mapping``: what walks the output of a model's forward, as
    accelerate does in mixed precision, would read every value of one and rebuild it from these.

    Those of one call also have ``logprobs`` and ``entropy`` of its tokens, (T,) in the order of the
    batch, detached: None where they were not given, or where calls were merged. (With
    ``metric_rows="active"`` they may be of the rows with a gradient alone.)
    """

    logprobs: Tensor | None = None
    entropy: Tensor | None = None

    def __init__(self, stats: Mapping[str, Stat]) -> None:
        self._stats = stats

    @property
    def stats(self) -> Mapping[str, Stat]:
        """The statistics behind the values, by name."""
        return self._stats

    def __getitem__(self, name: str) -> Tensor:
        return self.stats[name].value()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stats)

    def __len__(self) -> int:
        return len(self.stats)

    def __contains__(self, name: object) -> bool:
        return name in self.stats

    def keys(self) -> KeysView[str]:
        return self.stats.keys()

    def values(self) -> ValuesView[Tensor]:
        return ValuesView(self)

    def items(self) -> ItemsView[str, Tensor]:
        return ItemsView(self)

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        stat = self.stats.get(name)
        return default if stat is None else stat.value()

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self.stats)})"

    @staticmethod
    def merge(parts: Iterable[Metrics]) -> Metrics:
        """Combine the metrics of several batches as if they had been one."""
        merged: dict[str, list[Stat]] = {}
        for part in parts:
            for name, stat in part.stats.items():
                merged.setdefault(name, []).append(stat)
        return Metrics({name: _merge(stats) for name, stats in merged.items()})

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Metrics:
        """Merge the metrics of all processes, which have the same names, with a single gather.

        Args:
            gather: returns the processes' (1, n) tensors as one of shape (processes, n), as
                ``accelerate``'s does.
        """
        stats = sorted(self.stats.items())
        parts = [part.reshape(-1).double() for _, s in stats for part in (s.total, s.count)]
        if not parts:
            return self
        return Metrics.merge(_unpacked(stats, row) for row in gather(torch.cat(parts)[None]))


class LazyMetrics(Metrics):
    """Metrics that are made when they are first read, by
    ``make(logprobs, entropy, *parts)``.

    The parts are kept until then. Read them before what they hold is overwritten, such as the
    batch of a captured graph.
    """

    def __init__(
        self,
        make: Callable[..., Mapping[str, Stat]],
        *parts: Any,
        logprobs: Tensor,
        entropy: Tensor | None,
    ) -> None:
        self._make: Callable[..., Mapping[str, Stat]] | None = make
        self._parts = (logprobs, entropy, *parts)
        self.logprobs, self.entropy = logprobs, entropy

    @property
    def stats(self) -> Mapping[str, Stat]:
        # no cached_property: it locks all threads out (Python 3.11) while one waits for its ranks
        if self._make is not None:
            with torch.no_grad():
                made = self._make(*self._parts)
            self._make, self._parts = None, ()
            self._stats = {
                n: Stat(s.kind, s.total.detach(), s.count.detach()) for n, s in made.items()
            }
        return self._stats

    def ready_for(self, batch: TokenBatch) -> LazyMetrics:
        """Return these, made now if they are a collective: one rank alone may read them later."""
        if batch.sequence_group is not None:
            _ = self.stats
        return self


def _unpacked(stats: list[tuple[str, Stat]], row: Tensor) -> Metrics:
    unpacked, start = {}, 0
    for name, stat in stats:
        size = stat.total.numel()
        total = row[start : start + size].reshape(stat.total.shape)
        unpacked[name] = Stat(stat.kind, total, row[start + size])
        start += size + 1
    return Metrics(unpacked)


def _merge(stats: list[Stat]) -> Stat:
    kind = stats[0].kind
    total = _KINDS[kind].merge(torch.stack([stat.total for stat in stats]))
    return Stat(kind, total, torch.stack([stat.count for stat in stats]).sum())


def mean_stat(values: Tensor) -> Stat:
    """Average all values, accumulated in fp64."""
    return Stat("mean", values.double().sum(), _count(values))


def extreme_stat(kind: str, values: Tensor, valid: Tensor | None = None) -> Stat:
    """Take the ``"min"`` or ``"max"`` of ``values`` where ``valid``; fine on an empty tensor."""
    extreme = _KINDS[kind]
    values = values.double()
    count = _count(values)
    if valid is not None:
        values, count = torch.where(valid, values, extreme.neutral), valid.double().sum()
    padded = torch.cat([values, values.new_full((1,), extreme.neutral)])
    return Stat(kind, extreme.merge(padded), count)


def _count(values: Tensor) -> Tensor:
    return torch.full((), values.numel(), dtype=torch.float64, device=values.device)


def indicator_stats(
    indicators: Indicators, segments: Segments, one_per_sequence: bool
) -> dict[str, Stat]:
    """Reduce what a surrogate reports.

    Kinds: ``mean`` over tokens, or over sequences where all tokens of one have the same value;
    ``sequence_min`` and ``sequence_max`` of the sequences' means; ``per_sequence`` for (B,) values.

    Raises:
        ValueError: a kind is another.
    """
    lengths = segments.lengths
    occupied = torch.ones_like(lengths, dtype=torch.bool) if one_per_sequence else lengths > 0
    reductions: dict[str, Callable[[Tensor], Stat]] = {
        "mean": lambda values: mean_stat(segments.mean(values) if one_per_sequence else values),
        "per_sequence": mean_stat,
        "sequence_min": lambda values: extreme_stat("min", segments.mean(values), occupied),
        "sequence_max": lambda values: extreme_stat("max", segments.mean(values), occupied),
    }
    for name, (kind, _) in indicators.items():
        check_name(name, kind, reductions)
    return {n: reductions[kind](values.double()) for n, (kind, values) in indicators.items()}
