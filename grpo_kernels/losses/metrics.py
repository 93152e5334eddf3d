"""Metrics as mergeable statistics, computed when first read and left on the device."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.batch import Segments, TokenBatch
from grpo_kernels.common import check_name

# name -> (kind, values), reported by a surrogate; see `indicator_values` for the kinds
Indicators = dict[str, tuple[str, Tensor]]
Reductions = dict[str, tuple[Any, ...]]  # name -> the arguments of `stat_of`


class _Kind(NamedTuple):
    merge: Callable[[Tensor, int], Tensor] = torch.sum  # (n, ...) stacked totals, 0 -> (...)
    value: Callable[[Tensor, Tensor], Tensor] = lambda total, count: total  # both () -> ()
    neutral: float = 0.0  # the neutral element of merge


def _ratio(total: Tensor, count: Tensor) -> Tensor:
    return total / count.clamp(min=1)


_KINDS: dict[str, _Kind] = {
    "mean": _Kind(value=_ratio),
    "sum": _Kind(),
    # ratio of two norms: total and count are sums of squares
    "norm_ratio": _Kind(value=lambda total, count: torch.sqrt(total / count)),
    "min": _Kind(torch.amin, neutral=torch.inf),
    "max": _Kind(torch.amax, neutral=-torch.inf),
    # exp of the mean negative log-probability
    "perplexity": _Kind(value=lambda total, count: torch.exp(-_ratio(total, count))),
    # (sum r)^2 / (n sum r^2), the effective share of samples
    "ess": _Kind(value=lambda total, n: total[0] ** 2 / (n * total[1]).clamp(min=1e-30)),
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
    """Read-only mapping from metric name to () tensor, detached, on the device.

    Metrics are computed when first read. Read them before their inputs are overwritten, such as the
    batch of a captured CUDA graph. It has the methods of a mapping but is not a ``Mapping``, since
    code that walks the output of a model's forward, such as accelerate's, would read every value.

    Attributes:
        logprobs: (T,) log-probabilities of the call's tokens, in the order of the batch, detached.
            None for merged metrics. With ``metric_rows="active"`` there may be values only for the
            rows with a gradient.
        entropy: the same for the entropy, in nats; None if it was not given.
    """

    def __init__(
        self,
        stats: Mapping[str, Stat] | Callable[[], Mapping[str, Stat]],
        logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
    ) -> None:
        self._stats = stats
        self.logprobs = logprobs
        self.entropy = entropy

    @property
    def stats(self) -> Mapping[str, Stat]:
        """The statistics behind the values, by name."""
        # not a cached_property: its lock (Python 3.11) blocks all threads while one waits for ranks
        stats = self._stats
        if callable(stats):
            with torch.no_grad():
                self._stats = stats = stats()
        return stats

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stats:
            raise KeyError(f"{name}: expected one of {', '.join(self.stats)}")
        return self.stats[name].value()

    def __iter__(self) -> Iterator[str]:
        return iter(self.stats)

    def __len__(self) -> int:
        return len(self.stats)

    def keys(self) -> KeysView[str]:
        """Return the names."""
        return self.stats.keys()

    def values(self) -> ValuesView[Tensor]:
        """Return the values, () each."""
        return ValuesView(self)

    def items(self) -> ItemsView[str, Tensor]:
        """Return names and values."""
        return ItemsView(self)

    def get(self, name: str, default: Tensor | None = None) -> Tensor | None:
        """Return the value of a metric, or ``default`` if there is none."""
        stat = self.stats.get(name)
        return default if stat is None else stat.value()

    def ready_for(self, batch: TokenBatch) -> Metrics:
        """Return self, computed now if that is a collective: later a single rank may read it."""
        if batch.sequence_group is not None:
            _ = self.stats
        return self

    def __repr__(self) -> str:
        return f"Metrics({', '.join(self.stats)})"

    @staticmethod
    def merge(parts: Iterable[Metrics]) -> Metrics:
        """Combine the metrics of several batches as if they were one batch."""
        all_stats = [part.stats for part in parts]
        merged = {}
        for name in dict.fromkeys(name for stats in all_stats for name in stats):
            stats = [stats[name] for stats in all_stats if name in stats]
            kind = stats[0].kind
            count = torch.stack([stat.count for stat in stats]).sum()
            total = _KINDS[kind].merge(torch.stack([stat.total for stat in stats]), 0)
            merged[name] = Stat(kind, total, count)
        return Metrics(merged)

    def gathered(self, gather: Callable[[Tensor], Tensor]) -> Metrics:
        """Merge the metrics of all processes with a single gather. Names must be the same on all.

        Args:
            gather: returns the processes' (1, n) tensors as one tensor (processes, n), like
                ``accelerate``'s ``gather``.
        """
        stats = dict(sorted(self.stats.items()))
        if not stats:
            return self
        parts = [torch.cat([s.total.view(-1), s.count.view(1)]).double() for s in stats.values()]
        sizes = [part.numel() for part in parts]

        def unpacked(row: Tensor) -> Metrics:
            rows = zip(stats.items(), row.split(sizes), strict=True)
            return Metrics({n: Stat(s.kind, x[:-1].view_as(s.total), x[-1]) for (n, s), x in rows})

        return Metrics.merge(map(unpacked, gather(torch.cat(parts)[None])))


def stat_of(kind: str, values: Tensor, valid: Tensor | None = None) -> Stat:
    """Reduce the ``valid`` values in fp64; an empty tensor is allowed."""
    reduction = _KINDS[kind]
    values = values.double()
    count = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    if valid is not None:
        values = torch.where(valid, values, reduction.neutral)
        count = valid.double().sum()
    total = reduction.merge(values, 0) if values.numel() else values.new_full((), reduction.neutral)
    return Stat(kind, total, count)


def indicator_values(
    indicators: Indicators, segments: Segments, one_per_sequence: bool
) -> Reductions:
    """Return arguments of :func:`stat_of` for the indicators of a surrogate.

    Kinds: ``mean`` over tokens, or over sequences if all tokens of a sequence have the same value;
    ``sequence_min`` and ``sequence_max`` of the sequences' means; ``per_sequence`` for (B,) values.
    """
    occupied = None if one_per_sequence else segments.lengths > 0
    kinds = {  # the kind of a Stat, and whether it reduces the sequences' means
        "mean": ("mean", one_per_sequence),
        "per_sequence": ("mean", False),
        "sequence_min": ("min", True),
        "sequence_max": ("max", True),
    }
    reductions: Reductions = {}
    for name, (kind, values) in indicators.items():
        check_name(name, kind, kinds)
        reduction, of_means = kinds[kind]
        arguments = (segments.mean(values.double()), occupied) if of_means else (values,)
        reductions[name] = (reduction, *arguments)
    return reductions
