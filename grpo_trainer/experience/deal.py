"""Split scored completions into micro-batches, and compute the divisors of sums and means."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Divisors, MicroBatch, Scored, collate
from grpo_trainer.experience.parts import Costs, Plan, cut, deal_to_steps
from grpo_trainer.policy import Packing


def deal(
    batch: Scored, plan: Plan, accelerator: Accelerator, packing: Packing | None = None
) -> tuple[list[MicroBatch], Metrics]:
    """Return this process's micro-batches in training order, the same number for each micro-step,
    and metrics to log.

    Completions of several micro-steps are shuffled with torch's generator, as whole groups if
    ``packing`` then computes fewer tokens. Divisors are averages over the processes, like
    gradients.

    Args:
        batch: the completions and their advantages, on the device of the micro-batches.
        plan: determines which completions go together.
        accelerator: connects the processes.
        packing: packs the micro-batches; None: they stay padded.

    Raises:
        ValueError: a completion plus its prompt exceeds the token budget; on all processes.
    """
    samples, advantages = batch.samples, batch.compared.advantages[batch.own]
    device = advantages.device
    groups = [(batch.own.start + index) // plan.group_size for index in range(len(samples))]
    costs = Costs(samples, groups, packing, plan.pad_to_multiple_of)
    pools = deal_to_steps(plan, costs)
    in_loss = [sum(sample.in_loss) for sample in samples]
    counts = [sum(in_loss[i] for i in pool) for pool in pools]
    local = torch.tensor(counts, dtype=torch.float64, device=device)
    num_tokens = accelerator.reduce(local, "mean") / plan.pooled
    num_items = num_tokens.mean()
    parts, metrics = cut(pools, plan, costs, accelerator)
    prompt_tokens = num_prompts = None
    if plan.by_prompt:
        everyone = accelerator.gather(torch.tensor(in_loss, device=device))
        per_group = everyone.view(-1, plan.group_size).sum(1)
        prompt_tokens = per_group.repeat_interleave(plan.group_size)[batch.own]
        num_prompts = (per_group > 0).sum() / (plan.steps * accelerator.num_processes)
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
    """Exclude completions without an advantage from means over sequences and prompts.

    Call it after all columns, which may change advantages.
    """
    active = torch.stack([batch.num_active() for batch in batches]).sum(0)
    sequences, prompts = accelerator.reduce(active, "mean") / plan.steps
    for batch in batches:
        batch.num_sequences = sequences
        if plan.by_prompt:
            batch.num_prompts = prompts
