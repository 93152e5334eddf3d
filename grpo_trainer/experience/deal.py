"""Deal scored completions to micro-batches, and decide what their sums and means divide by."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from accelerate import Accelerator

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Divisors, MicroBatch, Sample, Scored, collate, padded_length
from grpo_trainer.monitor import value_metric

Part: TypeAlias = list[int]  # indices of the completions of a micro-batch


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How the completions of a generation batch become micro-batches."""

    steps: int  # micro-steps
    group_size: int  # completions per prompt
    pad_token_id: int
    pad_to_multiple_of: int | None = None
    by_prompt: bool = False  # the loss is a mean over prompts
    # most tokens of a micro-batch, padding included; None: a micro-step is one micro-batch
    budget: int | None = None
    accumulated: int = 1  # micro-steps of an optimizer step

    @property
    def pooled(self) -> int:
        """Micro-steps whose completions are cut together: those of one optimizer step."""
        return math.gcd(self.steps, self.accumulated) if self.budget else 1


def deal(batch: Scored, plan: Plan, accelerator: Accelerator) -> tuple[list[MicroBatch], Metrics]:
    """Return the micro-batches of this process in the order of training, equally many for each
    micro-step, and what is logged.

    Completions of several micro-steps are shuffled by torch's generator. Divisors are averages over
    the processes, as gradients are.

    Args:
        batch: the completions and their advantages, on the device of the micro-batches.
        plan: says which completions go together.
        accelerator: joins the processes.

    Raises:
        ValueError: a completion with its prompt has more tokens than the budget; on all processes.
    """
    samples, advantages = batch.samples, batch.compared.advantages[batch.own]
    device = advantages.device
    order = torch.randperm(len(samples)) if plan.steps > 1 else torch.arange(len(samples))
    pools = [pool.tolist() for pool in order.chunk(plan.steps // plan.pooled)]
    in_loss = [sum(sample.in_loss) for sample in samples]
    counts = [sum(in_loss[i] for i in pool) for pool in pools]
    local = torch.tensor(counts, dtype=torch.float64, device=device)
    num_tokens = accelerator.reduce(local, "mean") / plan.pooled
    num_items = num_tokens.mean()
    parts, metrics = [[pool] for pool in pools], Metrics({})
    if plan.budget:
        parts, metrics = cut(samples, pools, plan, accelerator)
    prompt_tokens = num_prompts = None
    if plan.by_prompt:
        everyone = accelerator.gather(torch.tensor(in_loss, device=device))
        groups = everyone.view(-1, plan.group_size).sum(1)
        prompt_tokens = groups.repeat_interleave(plan.group_size)[batch.own]
        num_prompts = (groups > 0).sum() / (plan.steps * accelerator.num_processes)
    batches = []
    for pool, tokens in zip(parts, num_tokens, strict=True):
        for part in pool:
            index = torch.tensor(part, device=device)
            divisors = Divisors(
                num_items=num_items,
                num_tokens=tokens,
                num_sequences=len(samples) / plan.steps if plan.budget else None,
                num_prompts=num_prompts,
                share=plan.pooled / len(pool),
            )
            micro_batch = collate(
                [samples[i] for i in part],
                advantages[index],
                divisors,
                plan.pad_token_id,
                pad_to_multiple_of=plan.pad_to_multiple_of,
                prompt_tokens=None if prompt_tokens is None else prompt_tokens[index],
            )
            batches.append(micro_batch)
    return batches, metrics


def leave_out_inactive(batches: Sequence[MicroBatch], plan: Plan, accelerator: Accelerator) -> None:
    """Let means over sequences and prompts leave out completions without an advantage.

    It comes after all columns, which may change advantages.
    """
    active = torch.stack([batch.num_active() for batch in batches]).sum(0)
    sequences, prompts = accelerator.reduce(active, "mean") / plan.steps
    for batch in batches:
        batch.num_sequences = sequences
        if plan.by_prompt:
            batch.num_prompts = prompts


def cut(
    samples: Sequence[Sample], pools: Sequence[Part], plan: Plan, accelerator: Accelerator
) -> tuple[list[list[Part]], Metrics]:
    """Cut pools of completions, the longest first, into micro-batches that keep to the budget.

    Each pool has equally many, on each process, since their collectives go together.

    Raises:
        ValueError: a completion with its prompt has more tokens; on all processes.
    """
    lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples]
    budget = plan.budget
    assert budget is not None  # or there would be nothing to cut

    def cost(part: Part) -> int:
        return computed_tokens([lengths[i] for i in part], plan.pad_to_multiple_of)

    def at_least(number: int) -> list[list[Part]]:
        by_length = [sorted(pool, key=lambda i: -lengths[i]) for pool in pools]
        return [cut_rows(pool, cost, budget, number) for pool in by_length]

    needed = max(map(len, at_least(plan.pooled)))
    longest = max(cost([i]) for i in range(len(samples)))
    everyone = accelerator.gather(torch.tensor([[needed, longest]], device=accelerator.device))
    number, longest = everyone.amax(0).tolist()
    if longest > budget:
        raise ValueError(
            f"max_tokens_per_micro_batch: expected at least {longest}, the tokens of the longest "
            f"completion with its prompt, got {budget}; raise it, or lower max_completion_length "
            "or max_prompt_length"
        )
    parts = at_least(number)
    computed = sum(cost(part) for pool in parts for part in pool)
    padding = computed - sum(lengths)
    numbers = value_metric(
        "micro_batches/number", number * plan.accumulated // plan.pooled, accelerator.device
    )
    shares = value_metric("micro_batches/padding", padding, accelerator.device, computed)
    return parts, Metrics.merge([shares, numbers])


def computed_tokens(lengths: Sequence[int], pad_to_multiple_of: int | None = None) -> int:
    """Return how many tokens the model's body computes for the micro-batch of these rows."""
    return len(lengths) * padded_length(lengths, pad_to_multiple_of)


def cut_rows(
    rows: Sequence[int], cost: Callable[[list[int]], int], budget: int, least: int
) -> list[list[int]]:
    """Cut rows, in their order, into parts that cost at most ``budget`` each, or are one row.

    There are as few as that takes, but at least ``least``, for which the costliest are halved.
    """
    parts: list[list[int]] = [[]]
    for row in rows:
        if parts[-1] and cost([*parts[-1], row]) > budget:
            parts.append([])
        parts[-1].append(row)
    while len(parts) < least:
        index = max(range(len(parts)), key=lambda i: (len(parts[i]) > 1) * cost(parts[i]))
        part = parts[index]
        parts[index : index + 1] = [part[: len(part) // 2], part[len(part) // 2 :]]
    return parts
