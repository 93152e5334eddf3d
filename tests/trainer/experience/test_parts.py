"""Groups stay together in micro-steps and micro-batches where what they share is computed once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset

from grpo_trainer.data import Divisors, MicroBatch, Sample, collate
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.experience.parts import Costs, Plan, cut, deal_to_steps
from grpo_trainer.policy import Packing
from tests.support.trainer import CannedEngine, lengths_reward, logged

SHARING = Packing(shares=True, pairs_per_token=6 * 1024)
GROUP = 4


def samples_of(groups: int, prompt: int = 60, seed: int = 0) -> list[Sample]:
    """Return groups with a prompt, half of whose completions begin with the same turn."""
    chance = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [chance.randrange(3, 99) for _ in range(count)]

    samples = []
    for _ in range(groups):
        start, turn = tokens(prompt), tokens(20)
        for number in range(GROUP):
            ids = turn * (number % 2) + tokens(chance.randint(1, 30))
            samples.append(Sample("", start, None, ids))
    return samples


def costs_of(samples: list[Sample], packing: Packing | None = SHARING, **changes: Any) -> Costs:
    groups = [at // GROUP for at in range(len(samples))]
    return Costs(samples, groups, packing, **changes)


def plan_of(**changes: Any) -> Plan:
    return Plan(**{"steps": 1, "group_size": GROUP, "pad_token_id": 0} | changes)


@pytest.fixture
def accelerator() -> Any:
    yield Accelerator(cpu=True)
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.parametrize("steps", (2, 3, 4, 6, 12))
@pytest.mark.parametrize("accumulated", (1, 2, 12))
def test_micro_steps_of_whole_groups(steps: int, accumulated: int) -> None:
    samples = samples_of(6)
    costs, plan = costs_of(samples), plan_of(steps=steps, accumulated=accumulated)
    torch.manual_seed(0)
    pools, again = deal_to_steps(plan, costs), deal_to_steps(plan, costs)
    assert pools != again  # they are shuffled
    for dealt in (pools, again):
        assert [len(pool) for pool in dealt] == [24 // steps] * steps
        assert sorted(row for pool in dealt for row in pool) == [*range(24)]
        for pool in dealt:
            together = [costs.groups[row] for row in pool]
            assert len({*together}) == -(-len(pool) // GROUP) or len(pool) % GROUP
    shuffled = deal_to_steps(plan, costs_of(samples, None))
    assert costs.total(pools) < 0.8 * costs.total(shuffled)


def test_parts_of_a_group_begin_alike_within_an_optimizer_step() -> None:
    costs = costs_of(samples_of(6))
    alike = {(at, at + 2) for at in range(0, 24, 4)} | {(at + 1, at + 3) for at in range(0, 24, 4)}

    def pairs(accumulated: int) -> set[tuple[int, ...]]:
        pools = deal_to_steps(plan_of(steps=12, accumulated=accumulated), costs)
        return {tuple(sorted(pool)) for pool in pools}

    torch.manual_seed(0)
    turns = {pair for pair in alike if pair[0] % 2}
    assert turns <= pairs(12)
    assert not turns <= pairs(1)  # optimizer steps are of completions by chance


@pytest.mark.parametrize(
    "case",
    [
        {"packing": None},
        {"packing": Packing()},
        {},  # masks would be larger
    ],
)
def test_the_order_without_sharing(case: dict[str, Any]) -> None:
    samples = [Sample("", [5], None, [*range(at + 6, at + 26)]) for at in range(24)]
    costs = costs_of(samples, case.get("packing", SHARING))
    torch.manual_seed(0)
    expected = [pool.tolist() for pool in torch.randperm(24).chunk(4)]
    torch.manual_seed(0)
    assert deal_to_steps(plan_of(steps=4, accumulated=2), costs) == expected


@pytest.mark.parametrize("multiple", (None, 16))
@pytest.mark.parametrize("steps", (1, 2, 4))
@pytest.mark.parametrize("budget", (130, 300, 700))
def test_micro_batches_of_groups_keep_to_the_budget(
    budget: int, steps: int, multiple: int | None, accelerator: Accelerator
) -> None:
    samples = samples_of(6)
    plan = plan_of(steps=steps, accumulated=2, budget=budget, pad_to_multiple_of=multiple)
    costs = costs_of(samples, multiple=multiple)
    parts, metrics = cut(deal_to_steps(plan, costs), plan, costs, accelerator)
    assert len({len(pool) for pool in parts}) == 1
    flat = [part for pool in parts for part in pool]
    assert sorted(row for part in flat for row in part) == [*range(24)]
    assert all(0 < costs(part) <= budget for part in flat)
    plain = costs_of(samples, None, multiple=multiple)
    apart, _ = cut(deal_to_steps(plan, plain), plan, plain, accelerator)
    tokens = plain.total([part for pool in apart for part in pool])
    assert costs.total(flat) <= tokens and len(flat) <= sum(map(len, apart))
    if budget > 130:
        assert costs.total(flat) < 0.7 * tokens
    computed, kept = (sum(each) for each in zip(*map(costs.of_part, flat), strict=True))
    values = {name: (stat.total / stat.count).item() for name, stat in metrics.stats.items()}
    assert values["micro_batches/padding"] == pytest.approx(1 - kept / computed)
    shared = 1 - kept / sum(costs.lengths)
    assert values["micro_batches/shared_tokens"] == pytest.approx(shared)


def processes_with(parts: int) -> Any:
    """Return what stands for several processes, of which one has so many parts of a pool."""

    def gather(needed: torch.Tensor) -> torch.Tensor:
        return torch.cat([needed, torch.tensor([[parts, 1]])])

    return SimpleNamespace(device=torch.device("cpu"), gather=gather)


def micro_batch(samples: list[Sample], packing: Packing) -> MicroBatch:
    one = torch.ones(())
    batch = collate(
        samples,
        torch.ones(len(samples)),
        Divisors(one, one),
        pad_token_id=0,
        pad_to_multiple_of=packing.multiple,
    )
    packing(batch, torch.nn.Identity())
    return batch


def test_a_half_that_shares_less_keeps_to_the_budget() -> None:
    """A row of 20 tokens twice and one that has 10 in common take 30; one of each is not shared."""
    rows = [[*range(20)], [*range(20)], [*range(10), *range(40, 50)]]
    samples = [Sample("", row[:1], None, row[1:]) for row in rows]
    costs, plan = costs_of(samples), plan_of(budget=35)
    assert costs([0, 1, 2]) == 30 and costs([0, 2]) == costs([1, 2]) == 40
    for number in (2, 3):
        [parts], _ = cut([[0, 1, 2]], plan, costs, processes_with(number))
        assert len(parts) == number and all(costs(part) <= 35 for part in parts)


@pytest.mark.parametrize("multiple", (None, 4, 16))
def test_a_micro_batch_is_packed_as_it_was_counted(multiple: int | None) -> None:
    """In the pool of a part other rows decide which branches are the largest."""
    chance = random.Random(0)
    packing = Packing(shares=True, pairs_per_token=192, multiple=multiple)
    shared = 0
    for _ in range(150):
        rows: list[list[int]] = [[3]]
        while len(rows) < 8:
            known = chance.choice(rows)
            start = known[: chance.randint(1, len(known))]
            rows.append(start + [chance.randint(3, 4) for _ in range(chance.choice((1, 5, 20)))])
        samples = [Sample("", row[:1], None, row[1:]) for row in rows]
        costs = costs_of(samples, packing, multiple=multiple)
        part = chance.sample(range(8), 5)
        batch = micro_batch([samples[row] for row in part], packing)
        if batch.owners is None:
            assert costs(part) == batch.input_ids.numel()
            continue
        shared += 1
        kept = int((batch.packed < batch.input_ids.numel()).sum())
        assert costs.of_part(part) == (batch.packed.numel(), kept)
    assert shared > 10


def test_images_are_never_shared() -> None:
    samples = samples_of(1)
    costs = costs_of(samples)
    assert costs.of_part([0, 1])[1] < sum(costs.lengths[:2])
    samples[0].images = {}
    costs = costs_of(samples)
    assert costs.of_part([0, 1]) == (2 * max(costs.lengths[:2]), sum(costs.lengths[:2]))
    assert costs.of_part([1, 2])[1] < sum(costs.lengths[1:3])


@pytest.mark.parametrize("changes", ({}, {"max_tokens_per_micro_batch": 64}), ids=str)
def test_the_body_computes_what_is_counted(changes: dict[str, Any], make_trainer: Any) -> None:
    """Two optimizer steps, of two micro-steps with a group each."""
    rows = Dataset.from_list([{"prompt": f"{'37' * 6}{at}="} for at in range(8)])
    trainer = make_trainer(
        lengths_reward, engine=CannedEngine(), train_dataset=rows, max_steps=2,
        model=make_policy(make_tokenizer(), seed=0), per_device_train_batch_size=4,
        gradient_accumulation_steps=2, steps_per_generation=4, **changes,
    )  # fmt: skip
    computed: list[torch.Tensor] = []

    def note(module: Any, args: tuple[torch.Tensor], output: Any) -> None:
        if trainer.is_in_train:
            computed.append(args[0])

    trainer.train(resume_from_checkpoint=None)
    batches = trainer._buffer.batches
    trainer.model.get_input_embeddings().register_forward_hook(note)
    trainer.is_in_train = True
    for batch in batches:
        trainer.compute_loss(trainer.model, batch)
    kept = sum(int((batch.packed < batch.input_ids.numel()).sum()) for batch in batches)
    assert sum(ids.numel() for ids in computed) == sum(batch.packed.numel() for batch in batches)
    whole = sum(int(batch.attention_mask.sum()) for batch in batches)
    assert kept < 0.5 * whole
    [first, *_] = logged(trainer)
    assert first["micro_batches/shared_tokens"] == pytest.approx(1 - kept / whole)
