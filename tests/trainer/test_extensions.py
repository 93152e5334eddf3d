"""Prompts, columns, terms and subclasses of the user's: the examples of the guide, and errors."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from grpo_trainer import GRPOTrainer, Prompts, Sample, Term
from grpo_trainer.data import MicroBatch
from grpo_trainer.trl_names import _INSTEAD, CALLED
from tests.support.documents import DOCS, ROOT, python_block, section
from tests.support.trainer import BackgroundEngine
from tests.trainer.features import engine

PAGE = (ROOT / "docs" / "guides" / "extending.md").read_text()


def example(name: str) -> Any:
    """Return a class of the guide: its block without the trainer, of fewer than 40 lines."""
    code = python_block(PAGE, f"class {name}")
    assert len(code.splitlines()) < 40
    names: dict[str, Any] = {}
    exec(code.partition("\ntrainer = ")[0], names)
    return names[name]


Replay = example("Replay")


def test_the_blocks_pass_them_to_the_trainer(make_args, policy, tokenizer, dataset):
    context = {
        "model": policy, "args": make_args(max_steps=1), "dataset": dataset,
        "reward": lambda completions, **_: [float(len(text)) for text in completions],
    }  # fmt: skip
    for name in ("Replay", "ProcessReward", "ImitateTheBest"):
        code = python_block(PAGE, f"class {name}")
        names = context | {"GRPOTrainer": None}
        code = re.sub(r"GRPOTrainer\(", "GRPOTrainer(processing_class=tokenizer, ", code)
        exec(code, names | {"tokenizer": tokenizer})


def watched(seen: list[list[tuple[str, list[int]]]]) -> type[GRPOTrainer]:
    """Return a trainer that notes prompts and completions of each generation batch."""

    class Watched(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            seen.append(list(zip(prompts, completion_ids_list, strict=True)))
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    return Watched


def test_groups_are_replayed(make_trainer):
    """With their completions, and the columns that rewards read."""
    seen: list[list[tuple[str, list[int]]]] = []

    def reward(completion_ids, answer, **columns):
        return [float(row % 2) for row, _ in enumerate(completion_ids)]

    trainer = make_trainer(
        reward,
        kind=watched(seen),
        prompts=Replay,
        num_generations=2,
        max_steps=3,
        **engine(),
    )
    trainer.train()
    first, second, third = seen
    assert second[2:] == first[:2] and third[2:] == first[2:]
    fresh = [prompt for prompt, _ in (*first, *second[:2], *third[:2])]
    assert len(set(fresh)) == 4  # the dataset goes on after them
    [batch] = trainer._buffer.batches
    assert batch.rollout_logprobs is not None  # by which the loss corrects
    assert batch.advantages.abs().min() > 0


WITHOUT_DATASET = {"train_dataset": None, "eval_dataset": None}


class OwnPrompts(Prompts):
    """Prompts without a dataset."""

    def __init__(self, fresh):
        assert fresh is None
        self.number = 0

    def next(self, count):
        self.number += count
        return [Sample(f"{self.number + i // 4}=") for i in range(4 * count)]

    def state(self):
        return {"number": self.number}

    def restore(self, state):
        self.number = state["number"]


def test_prompts_without_a_dataset(make_trainer):
    seen: list[list[tuple[str, list[int]]]] = []

    def reward(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(reward, kind=watched(seen), prompts=OwnPrompts, **WITHOUT_DATASET)
    trainer.train()
    assert [[prompt for prompt, _ in batch] for batch in seen] == [["1="] * 4, ["2="] * 4]


def first_tokens_count(sample):
    assert sample.row["answer"] and sample.completion is not None
    return [float(position < 2) for position, _ in enumerate(sample.completion_ids)]


def test_rewards_of_steps_are_added(make_trainer):
    """Two tokens of each completion get an advantage, though all rewards are equal."""
    column = example("ProcessReward")(first_tokens_count)
    trainer = make_trainer(lambda completions, **_: [1.0] * 4, columns=[column], max_steps=1)
    trainer.train()
    [batch] = trainer._buffer.batches
    assert batch.advantages.shape == batch.target.shape
    for row, target in zip(batch.advantages, batch.target, strict=True):
        values = row[target >= 0].tolist()
        assert values == pytest.approx([0.1, 0.1, 0.0, 0.0][: len(values)])
    logged = trainer.state.log_history[0]["process_reward"]
    assert logged == pytest.approx(10 * batch.advantages[batch.target >= 0].mean().item(), rel=1e-5)


class OnlyALoss(Term):
    def on_head(self, batch, policy):
        return lambda hidden, head: hidden.sum()


class Demonstrations(OwnPrompts):
    """One of four completions is the user's: tokens only, without log-probabilities."""

    def next(self, count):
        samples = super().next(count)
        samples[0].completion_ids = [3, 4, 1]
        return samples


def given_by(*others):
    """Return prompts of which the first sample is replaced by what ``others`` make."""

    class Wrong(OwnPrompts):
        def next(self, count):
            return [*(make() for make in others), *super().next(count)[1:]]

    return {"prompts": Wrong} | WITHOUT_DATASET


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"columns": [lambda batch, policy: {"mine": 1.0}]},
            "columns: expected Metrics or None from .*lambda>, got {'mine': 1.0}",
        ),
        ({"terms": [OnlyALoss()]}, "terms: expected a loss and Metrics from OnlyALoss, got tensor"),
        (given_by(lambda: Sample("1=", completion_ids=[99])), "sample 0: expected completion_ids"),
        (
            given_by(lambda: Sample("1=", completion_ids=[3] * 9)),
            "sample 0: expected 1 to 4 tokens",
        ),
        (given_by(lambda: Sample("1=", row={"other": 1})), "expected the same columns in the rows"),
        (given_by(lambda: {"prompt": "1="}), "prompts: expected a list of Samples from next"),
        (given_by(), "prompts: expected 4 distinct samples for this process from next, got 3"),
    ],
)
def test_what_they_return_is_checked(make_trainer, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=1, **changes).train()


def test_completions_that_the_user_has(make_trainer):
    """They count as new ones next to those that the engine reports log-probabilities of."""
    seen: list[list[tuple[str, list[int]]]] = []
    trainer = make_trainer(
        lambda completions, **_: [float(len(text)) for text in completions],
        kind=watched(seen), prompts=Demonstrations, max_steps=1, **WITHOUT_DATASET, **engine(4),
    )  # fmt: skip
    trainer.train()
    assert seen[0][0] == ("1=", [3, 4, 1])
    [batch] = trainer._buffer.batches
    known = ~batch.rollout_logprobs.isnan() & (batch.target >= 0)
    assert known.any(1).tolist() == [row[2:5].tolist() != [3, 4, 1] for row in batch.input_ids]


def test_replayed_samples_keep_the_columns_of_a_rollout_func(make_trainer):
    def rollout(prompts, trainer):
        ids = [[3 + row, 4, 1] for row, _ in enumerate(prompts)]
        encoded = trainer.processing_class(prompts)["input_ids"]
        luck = [float(row) for row, _ in enumerate(prompts)]
        return {"prompt_ids": encoded, "completion_ids": ids, "logprobs": None, "luck": luck}

    seen = []

    def reward(luck, **columns):
        seen.append(luck)
        return luck

    changes = {"num_generations": 2, "max_steps": 2}
    make_trainer(reward, prompts=Replay, rollout_func=rollout, **changes).train()
    assert seen == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_a_class_without_its_methods_cannot_be_made(make_trainer):
    class Forgetful(Prompts):
        def next(self, count):
            return []

    with pytest.raises(TypeError, match="abstract class Forgetful .*restore"):
        make_trainer(prompts=lambda fresh: Forgetful())


@pytest.mark.parametrize("steps", [1, 2])
def test_a_term_is_a_mean_over_the_tokens_of_a_step(make_trainer, steps):
    """Of its value and its gradient: those of torch's cross-entropy on the logits."""
    trainer = make_trainer(
        lambda completion_ids, **_: [float(row) for row, _ in enumerate(completion_ids)],
        terms=[example("ImitateTheBest")(weight=0.5)],
        gradient_accumulation_steps=steps,
        max_steps=1,
    )
    trainer.current_gradient_accumulation_steps = steps
    batches = trainer._generation_batch()
    plain = make_trainer(model=trainer.model)
    plain.current_gradient_accumulation_steps = steps
    for batch in batches:
        added = trainer.compute_loss(trainer.model, batch) - plain.compute_loss(plain.model, batch)
        output = trainer.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
        best = (batch.target >= 0) & (batch.advantages > 0)[:, None]
        logits, targets = output.logits[best].double(), batch.target[best]
        nll = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        expected = 0.5 * nll / batch.num_items / steps
        assert added.item() == pytest.approx(expected.item(), rel=1e-4)
        weight = trainer.model.lm_head.weight
        found, exact = (torch.autograd.grad(x, weight)[0] for x in (added, expected))
        assert (found - exact).norm() <= 1e-4 * exact.norm()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompts": Dataset.from_list([])},
            "prompts: expected a class or function .* got Dataset",
        ),
        (
            {"prompts": lambda fresh: None},
            "prompts: expected an object with next, .* got None",
        ),
        (
            {"prompts": Replay, "generation_batches_ahead": 1},
            "batches_ahead: expected 0 with prompts",
        ),
        (
            {"prompts": OwnPrompts, "train_dataset": None, "max_steps": -1},
            "max_steps: expected the number of steps",
        ),
        (
            {"columns": ["kl"]},
            "columns: expected functions of a micro-batch .* got 'kl'",
        ),
        ({"terms": [type("Idle", (Term,), {})()]}, "terms: expected a class that defines on_head"),
        ({"terms": [Term]}, "terms: expected objects of classes that inherit Term"),
        ({"terms": Term}, "terms: expected a list, got"),
        ({"terms": [len]}, "terms: expected objects of classes that inherit Term, got <built-in"),
    ],
)
def test_what_is_none(make_trainer, tokenizer, changes, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(engine=BackgroundEngine(tokenizer), **changes)


def test_a_sample_with_a_column_that_no_checkpoint_holds():
    row = {"prompt": "1=", "when": object()}
    with pytest.raises(
        ValueError, match="Sample.state: column 'when': expected numbers, .* object"
    ):
        Sample("1=", row=row).state()


# a subclass with methods of TRL's trainer: they are called, or it is told what to do instead


def test_the_guide_names_fields_of_a_micro_batch():
    rows = re.findall(r"^\| `.+? \| (.+?) \|", section(DOCS, "MicroBatch"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(named) > 5
    assert named <= {item.name for item in fields(MicroBatch)}


def test_every_field_of_a_micro_batch_is_documented():
    """By the comment that the reference shows."""
    lines = inspect.getsource(MicroBatch).splitlines()
    for item in fields(MicroBatch):
        (number,) = [n for n, line in enumerate(lines) if line.startswith(f"    {item.name}:")]
        assert "#" in lines[number] or lines[number - 1].startswith("    #"), item.name


def test_rewards_are_calculated_by_the_subclass(make_trainer):
    seen: list[Any] = []

    class Doubling(GRPOTrainer):
        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            seen.append((inputs, prompts, completions, completion_ids_list))
            return 2 * super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def reward(completion_ids, answer, log_extra, log_metric, trainer_state, **columns):
        log_extra("answered", answer)
        log_metric("half", 0.5)
        return [float(len(ids)) for ids in completion_ids]

    trainer = make_trainer(reward, kind=Doubling, max_steps=1, log_completions=True)
    trainer.train()
    [(inputs, prompts, completions, ids)] = seen
    assert [row["prompt"] for row in inputs] == prompts and all(row["answer"] for row in inputs)
    assert len(prompts) == len(completions) == len(ids) == 4
    [row, *_] = trainer.state.log_history
    assert row["reward"] == pytest.approx(2 * sum(map(len, ids)) / 4) and row["half"] == 0.5


def test_the_loss_is_computed_by_the_subclass(make_trainer):
    class Regularised(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super()._compute_loss(model, inputs) + 7.0

    losses = []
    for kind in (GRPOTrainer, Regularised):
        trainer = make_trainer(kind=kind, max_steps=1)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] - losses[0] == pytest.approx(7.0, abs=1e-5)


@pytest.mark.parametrize("name", [*_INSTEAD, *CALLED])
def test_what_nobody_would_call_is_refused(make_trainer, name):
    kind = type("Mine", (GRPOTrainer,), {name: lambda self, one, *, two: None})
    said = (
        "expected no method of this name"
        if name in _INSTEAD
        else rf"expected a method that takes \({CALLED.get(name, ())[0]}"
    )
    with pytest.raises(ValueError, match=rf"Mine\.{name}: {said}"):
        make_trainer(kind=kind)


def test_the_names_are_those_of_trl():
    trl = pytest.importorskip("trl")
    assert all(hasattr(trl.GRPOTrainer, name) for name in (*CALLED, *_INSTEAD))


def test_rewards_of_another_shape(make_trainer):
    class Wrong(GRPOTrainer):
        def _calculate_rewards(self, *given: Any) -> Any:
            return torch.zeros(4)

    message = r"_calculate_rewards: expected a tensor of \(4, 1\).*\(4,\)"
    with pytest.raises(ValueError, match=message):
        make_trainer(kind=Wrong, max_steps=1).train()
