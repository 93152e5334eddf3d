"""Which completions of a generation batch share a micro-step, and a micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from accelerate import Accelerator

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Sample, padded_length
from grpo_trainer.monitor import value_metric
from grpo_trainer.policy import Packing, Prefixes

Part: TypeAlias = list[int]  # indices of completions that go together


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the completions of a generation batch are split into micro-batches."""

    steps: int  # micro-steps
    group_size: int  # completions per prompt
    pad_token_id: int
    pad_to_multiple_of: int | None = None
    by_prompt: bool = False  # the loss is a mean over prompts
    # the most tokens computed per micro-batch, padding included; None: a micro-step is one
    # micro-batch
    budget: int | None = None
    accumulated: int = 1  # micro-steps per optimizer step

    @property
    def window(self) -> int:
        """Micro-steps of one optimizer step within a generation batch."""
        return math.gcd(self.steps, self.accumulated)

    @property
    def pooled(self) -> int:
        """Micro-steps whose completions are split together: one optimizer step's."""
        return self.window if self.budget else 1


class Costs:
    """The tokens that the model's body computes for completions of a generation batch.

    Args:
        samples: the completions.
        groups: the group of each completion.
        packing: packs their micro-batches; None: they stay padded.
        multiple: a micro-batch's width is a multiple of it.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        groups: Sequence[int],
        packing: Packing | None = None,
        multiple: int | None = None,
    ) -> None:
        rows = [sample.prompt_ids + sample.completion_ids for sample in samples]
        self.lengths = [len(row) for row in rows]
        self.groups = groups
        self._images = {i for i, sample in enumerate(samples) if sample.images is not None}
        self._multiple = multiple
        self._packing = packing
        # None: nothing is shared
        self.prefixes = Prefixes.of(rows) if packing is not None and packing.shares else None
        self._rank = [0] * len(samples)
        if self.prefixes is not None:
            for place, row in enumerate(self.prefixes.largest_first().rows):
                self._rank[row] = place
        self._known: dict[tuple[int, ...], tuple[int, int]] = {}

    def of_part(self, part: Part) -> tuple[int, int]:
        """Return a micro-batch's computed tokens, with and without padding. Shared prefixes count
        once if they are computed once."""
        key = tuple(part)
        if key not in self._known:
            self._known[key] = self._of_part(part)
        return self._known[key]

    def _of_part(self, part: Part) -> tuple[int, int]:
        lengths = [self.lengths[i] for i in part]
        if self.prefixes is not None and self._images.isdisjoint(part):
            assert self._packing is not None  # prefixes exist only with packing
            prefixes = self.prefixes.take(part).largest_first()
            runs = self._packing.shared(prefixes, padded_length(lengths, self._multiple))
            if runs is not None:
                sizes = [prefixes.tokens(run) for run in runs]
                return math.prod(self._packing.shape(sizes)), sum(sizes)
        return computed_tokens(lengths, self._multiple), sum(lengths)

    def __call__(self, part: Part) -> int:
        return self.of_part(part)[0]

    def with_halves(self, part: Part, budget: int) -> int:
        """Return a part's cost, or the cost of a half from :func:`halved` if only that exceeds the
        budget: a half that shares less may cost more than the whole."""
        cost, padded = self(part), computed_tokens([self.lengths[i] for i in part], self._multiple)
        if cost > budget or padded <= budget:  # no half costs more than the padded whole
            return cost
        return max(cost, *(self.with_halves(half, budget) for half in _halves(part)))

    def total(self, parts: Sequence[Part]) -> int:
        return sum(self(part) for part in parts)

    def by_group(self, part: Part, alike: bool = True) -> Part:
        """Sort completions by group, and within a group, if ``alike``, so that neighbors have the
        most in common. Groups keep the order of their first completions."""
        begins: dict[int, int] = {}
        for place, row in enumerate(part):
            begins.setdefault(self.groups[row], place)
        return sorted(part, key=lambda row: (begins[self.groups[row]], alike and self._rank[row]))


def deal_to_steps(plan: Plan, costs: Costs) -> list[Part]:
    """Return the completions of each micro-step, or, with a budget, of each optimizer step.

    Completions are shuffled, or whole groups if that computes fewer tokens. If an optimizer step
    ends within a group, chance decides which of its completions come first.
    """
    count, parts = len(costs.lengths), plan.steps // plan.pooled
    if plan.steps == 1:
        return [[*range(count)]]
    order = torch.randperm(count).tolist()
    shuffled = _chunks(order, parts)
    if costs.prefixes is None:
        return shuffled
    windows = _chunks(costs.by_group(order, alike=False), plan.steps // plan.window)
    grouped = _chunks([row for window in windows for row in costs.by_group(window)], parts)

    def tokens(pools: list[Part]) -> int:
        return sum(costs.total(_best_cut(pool, plan, costs)) for pool in pools)

    return min(shuffled, grouped, key=tokens)


def cut(
    pools: Sequence[Part], plan: Plan, costs: Costs, accelerator: Accelerator
) -> tuple[list[list[Part]], Metrics]:
    """Split pools of completions into micro-batches within the budget; without a budget, each pool
    is a micro-batch.

    Each pool gets the same number on every process, since their collectives must match.

    Raises:
        ValueError: a completion plus its prompt has more tokens; on all processes.
    """
    parts, metrics = [_best_cut(pool, plan, costs) for pool in pools], []
    device, budget = accelerator.device, plan.budget
    if budget:
        needed = max(plan.pooled, *map(len, parts))
        longest = padded_length(costs.lengths, plan.pad_to_multiple_of)
        everyone = accelerator.gather(torch.tensor([[needed, longest]], device=device))
        number, longest = everyone.amax(0).tolist()
        if longest > budget:
            raise ValueError(
                f"max_tokens_per_micro_batch: expected at least {longest}, the tokens of the "
                f"longest completion with its prompt, got {budget}; raise it, or lower "
                "max_completion_length or max_prompt_length"
            )
        parts = [halved(pool, costs, number) for pool in parts]
        per_step = number * plan.accumulated // plan.pooled
        metrics.append(value_metric("micro_batches/number", per_step, device))
    taken = [costs.of_part(part) for pool in parts for part in pool]
    computed, kept = (sum(tokens) for tokens in zip(*taken, strict=True))
    if budget:
        padding = computed - kept
        metrics.append(value_metric("micro_batches/padding", padding, device, computed))
    if costs.prefixes is not None:
        whole = sum(costs.lengths)
        metrics.append(value_metric("micro_batches/shared_tokens", whole - kept, device, whole))
    return parts, Metrics.merge(metrics)


def _best_cut(pool: Part, plan: Plan, costs: Costs) -> list[Part]:
    """Split a pool by length, longest first, or group by group if that computes fewer tokens."""
    if not plan.budget:
        return [pool]
    by_length = sorted(pool, key=lambda row: -costs.lengths[row])
    orders = [by_length]
    if costs.prefixes is not None:
        orders.append(costs.by_group(by_length))
    cost = partial(costs.with_halves, budget=plan.budget)
    cuts = [cut_rows(order, cost, plan.budget) for order in orders]
    return min(cuts, key=costs.total)


def _chunks(part: Part, count: int) -> list[Part]:
    return [chunk.tolist() for chunk in torch.tensor(part).chunk(count)]


def computed_tokens(lengths: Sequence[int], pad_to_multiple_of: int | None = None) -> int:
    """Return the number of tokens that the model's body computes for these rows' micro-batch."""
    return len(lengths) * padded_length(lengths, pad_to_multiple_of)


def cut_rows(rows: Sequence[int], cost: Callable[[Part], int], budget: int) -> list[Part]:
    """Split rows, in order, into as few parts as possible that cost at most ``budget`` each, or
    have one row."""
    parts: list[Part] = []
    left, size = [*rows], 1  # the search for a part's size starts at the previous size
    while left:
        while size < len(left) and cost(left[: size + 1]) <= budget:
            size += 1
        size = min(size, len(left))
        while size > 1 and cost(left[:size]) > budget:
            size -= 1
        parts.append(left[:size])
        left = left[size:]
    return parts


def halved(parts: Sequence[Part], cost: Callable[[Part], int], least: int) -> list[Part]:
    """Halve the most expensive parts until there are ``least`` parts."""
    parts = [*parts]
    while len(parts) < least:
        index = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1) * cost(parts[i]))
        parts[index : index + 1] = _halves(parts[index])
    return parts


def _halves(part: Part) -> list[Part]:
    middle = len(part) // 2
    return [part[:middle], part[middle:]]
