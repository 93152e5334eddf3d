"""What rows begin with in common is computed once: losses and gradients stay."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import PreTrainedModel

from grpo_kernels import LossConfig
from grpo_trainer.data import RolloutBuffer
from grpo_trainer.policy import (
    Packing,
    Prefixes,
    forward,
    make_pack,
    policy_loss_of,
    target_logprobs,
)
from grpo_trainer.policy.forward import _mask_of_shared, _places
from tests.trainer.policy.test_packing import collated, groups, packed_by, tiny, tokens, turns

SHARING = Packing(shares=True, pairs_per_token=192)


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, adapter).get_base_model()


def checkpointed(model: PreTrainedModel) -> PreTrainedModel:
    model.gradient_checkpointing_enable()
    return model.train()


@pytest.mark.parametrize("pack", (SHARING, Packing(always=True)), ids=("shared", "packed"))
@pytest.mark.parametrize("change", (lambda model: model, adapted, checkpointed))
def test_losses_where_rows_branch(change: Any, pack: Packing) -> None:
    """Each row has its own next token, advantages and masks at what it has in common."""
    plain = tiny("gpt2", attn_pdrop=0).double()
    model, batch = change(plain), turns()
    torch.manual_seed(0)
    batch.advantages = torch.randn(batch.target.shape, dtype=torch.float64)
    batch.target = batch.target.where(torch.rand(batch.target.shape) < 0.7, -100)
    batch.lengths = batch.active_lengths = None
    batch.old_logprobs = target_logprobs(model, batch, 0.7) + 0.1
    batch.ref_logprobs = batch.old_logprobs - 0.2
    once = packed_by(pack, batch)
    assert (once.owners is not None) == pack.shares
    in_loss = batch.target >= 0
    found = target_logprobs(model, once, 0.7) + 0.1
    torch.testing.assert_close(found[in_loss], batch.old_logprobs[in_loss], rtol=1e-12, atol=0)
    config = LossConfig(loss_type="grpo", beta=0.1, temperature=0.7)
    trained = [x for x in model.parameters() if x.requires_grad]
    results = []
    for each in (batch, once):
        loss, _ = policy_loss_of(model, each, each.token_batch(1), config, {})
        gradients = torch.autograd.grad(loss, trained)
        results.append(torch.cat([loss.view(1), *(x.flatten() for x in gradients)]))
    expected, found = results
    assert expected.norm() > 1e-3
    assert (found - expected).norm() <= 1e-12 * expected.norm()


def test_a_token_stands_once_in_its_run() -> None:
    chance = random.Random(1)
    shared = 0
    for _ in range(100):
        batch = collated(drawn(chance))
        once = packed_by(SHARING, batch)
        if once.owners is None:
            continue
        shared += 1
        (count, width), mask = batch.input_ids.shape, batch.attention_mask.bool()
        elements, places = once.packed.flatten(), _places(once)
        kept = elements[elements < count * width]
        assert len(kept.unique()) == len(kept) < mask.sum()
        assert once.packed.shape[0] * once.packed.shape[1] ** 2 <= count * width**2
        assert batch.input_ids.flatten()[elements[places[mask]]].equal(batch.input_ids[mask])
        seen = _mask_of_shared(once)[:, 0]
        for row, length in zip(places, mask.sum(1).tolist(), strict=True):
            [number] = (row[:length] // once.packed.shape[1]).unique()
            inside = row[:length] % once.packed.shape[1]
            expected = torch.zeros(length, once.packed.shape[1], dtype=torch.bool)
            for at in range(length):
                expected[at, inside[: at + 1]] = True
            assert seen[number, inside].equal(expected)
    assert shared > 30


@pytest.mark.parametrize(
    "case",
    [
        {"attention": "eager"},
        {"family": "mistral"},
        {"family": "gemma3_text"},
        {"family": "llama4_text"},
        {"routers": True},
        {"batch": lambda: groups((3, 4, 5, 6))},  # all are different
        # masks would be larger than padded ones
        {"batch": lambda: collated([[7, 8, *tokens(12)] for _ in range(12)])},
    ],
)
def test_where_nothing_is_shared(case: dict[str, Any], make_args: Any) -> None:
    model = tiny(case.get("family", "llama"), case.get("attention", "sdpa"))
    models = [(model, nullcontext(model))]
    pack = make_pack(make_args(), models, images=False, routers=case.get("routers", False))
    assert packed_by(pack, case.get("batch", groups)()).owners is None


def drawn(chance: random.Random) -> list[list[int]]:
    """Return rows of which some begin like others."""
    rows: list[list[int]] = [[]]
    for _ in range(chance.randint(1, 12)):
        known = chance.choice(rows)
        start = known[: chance.randint(0, len(known))]
        rows.append(start + [chance.randint(1, 3) for _ in range(chance.randint(2, 30))])
    return rows[1:]


def test_runs_of_rows_are_trees() -> None:
    chance = random.Random(2)
    for _ in range(50):
        rows = drawn(chance)
        prefixes = Prefixes.of(rows)
        assert sorted(prefixes.rows) == [*range(len(rows))]
        some = chance.sample(range(len(rows)), chance.randint(1, len(rows)))
        taken = prefixes.take(some).largest_first()
        direct = Prefixes.of([rows[row] for row in some]).largest_first()
        assert taken.lengths == direct.lengths and taken.common == direct.common
        assert [rows[row] for row in taken.rows] == [rows[some[row]] for row in direct.rows]
        prefixes = prefixes.largest_first()
        for run in prefixes.runs(0.01):
            members = [rows[prefixes.rows[at]] for at in run]
            starts = {tuple(row[: at + 1]) for row in members for at in range(len(row))}
            assert prefixes.tokens(run) == len(starts)


def test_runs_are_the_best() -> None:
    chance, price = random.Random(3), 0.02
    for _ in range(30):
        prefixes = Prefixes.of(drawn(chance)[:7]).largest_first()
        count = len(prefixes.rows)

        def cost(runs: list[range], prefixes: Prefixes = prefixes) -> float:
            sizes = [prefixes.tokens(run) for run in runs]
            return sum(size + price * size**2 for size in sizes)

        every = []
        for ends in range(2 ** (count - 1)):
            stops = [at + 1 for at in range(count - 1) if ends >> at & 1] + [count]
            every.append([range(*pair) for pair in zip([0, *stops], stops, strict=False)])
        assert cost(prefixes.runs(price)) == pytest.approx(min(map(cost, every)))
        bounded = prefixes.runs(0.0, most=40)
        assert all(len(run) == 1 or prefixes.tokens(run) <= 40 for run in bounded)


def test_the_loss_gets_its_tokens_and_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rows have in common is not made as large as padded rows again."""
    seen: list[torch.Size] = []
    exact = forward.linear_policy_loss

    def noted(hidden: Tensor, *args: Any, **options: Any) -> Any:
        seen.append(hidden.shape)
        return exact(hidden, *args, **options)

    monkeypatch.setattr(forward, "linear_policy_loss", noted)
    batch = packed_by(SHARING, turns())
    policy_loss_of(tiny("llama"), batch, batch.token_batch(1), LossConfig(), {})
    assert seen == [((batch.target >= 0).sum(), 32)]


def test_a_checkpoint_has_owners_and_those_of_1_0_0_are_padded() -> None:
    shared = packed_by(SHARING, turns())
    buffer = RolloutBuffer(1, 1)
    buffer.batches = [shared]
    state = buffer.state()
    buffer.restore(state)
    [restored] = buffer.batches
    assert restored.packed.equal(shared.packed) and restored.owners.equal(shared.owners)
    [old] = state["batches"]
    old["shares_prompts"] = True
    del old["owners"]
    buffer.restore(state)
    assert buffer.batches[0].packed is None and buffer.batches[0].owners is None
