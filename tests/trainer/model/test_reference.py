"""The reference model that follows the policy."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import TrainerCallback

from grpo_trainer import GRPOTrainer
from tests.support.trainer import CannedEngine, lengths_reward, parameters


@pytest.fixture
def make(make_trainer, policy):
    def trainer(**changes) -> GRPOTrainer:
        changes = dict(beta=0.1, lr_scheduler_type="constant") | changes
        return make_trainer(lengths_reward, copy.deepcopy(policy), CannedEngine(), **changes)

    return trainer


class Snapshots(TrainerCallback):
    """The policy's parameters after every optimizer step."""

    def __init__(self) -> None:
        self.taken: list[torch.Tensor] = []

    def on_step_end(self, args, state, control, model, **kwargs) -> None:
        self.taken.append(parameters(model))


def test_sync_is_the_formula(make):
    trainer = make(
        sync_ref_model=True, ref_model_mixup_alpha=0.3, ref_model_sync_steps=2, max_steps=5
    )
    expected = parameters(trainer.ref_model)
    snapshots = Snapshots()
    trainer.add_callback(snapshots)
    trainer.train()
    for step in (2, 4):
        expected = 0.7 * expected + 0.3 * snapshots.taken[step - 1]
    torch.testing.assert_close(parameters(trainer.ref_model), expected, rtol=1e-6, atol=1e-7)
    assert not any(parameter.requires_grad for parameter in trainer.ref_model.parameters())


def test_without_sync_it_stays(make):
    trainer = make(max_steps=2)
    start = parameters(trainer.ref_model)
    trainer.train()
    assert torch.equal(parameters(trainer.ref_model), start)
    assert not any(p.requires_grad for p in trainer.ref_model.parameters())
    first, second = (row["kl"] for row in trainer.state.log_history if "kl" in row)
    assert first == pytest.approx(0, abs=1e-6) and second > 1e-6
