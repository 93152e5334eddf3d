"""A subclass with methods of TRL's trainer: they are called, or it is told what to do instead."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_trainer import GRPOTrainer
from grpo_trainer.data import MicroBatch
from grpo_trainer.trl_names import _INSTEAD, CALLED
from tests.support.documents import DOCS


def test_every_field_of_a_micro_batch_is_documented():
    rows = [line for line in DOCS.splitlines() if line.startswith("| ")]
    for item in fields(MicroBatch):
        assert any(f"| `{item.name}`" in row for row in rows), item.name


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
        "no such method"
        if name in _INSTEAD
        else rf"a method that takes \({CALLED.get(name, ())[0]}"
    )
    with pytest.raises(ValueError, match=rf"Mine\.{name}: expected {said}"):
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
