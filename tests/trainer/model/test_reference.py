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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "sync_ref_model: expected False with beta=0"),
        ({"ref_model_sync_steps": 0}, "ref_model_sync_steps: expected an integer >= 1"),
        ({"ref_model_mixup_alpha": 1.5}, "ref_model_mixup_alpha: expected"),
    ],
)
def test_wrong_settings(make_args, changes, message):
    with pytest.raises(ValueError, match=message):
        make_args(**({"beta": 0.1, "sync_ref_model": True} | changes))


def test_a_model_whose_head_is_not_understood_is_refused(make_trainer, policy):
    head = policy.lm_head
    head.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="its head is not supported"):
        make_trainer(model=policy)
