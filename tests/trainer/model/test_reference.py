"""The reference model that follows the policy."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from trainer_helpers import CannedEngine, parameters
from transformers import TrainerCallback

from grpo_trainer import GRPOTrainer


def lengths_reward(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


@pytest.fixture
def make(make_trainer, policy):
    def trainer(**changes) -> GRPOTrainer:
        changes = dict(beta=0.1, learning_rate=1e-2, lr_scheduler_type="constant") | changes
        made = make_trainer(lengths_reward, copy.deepcopy(policy), **changes)
        made._collector._rollouts = CannedEngine(made.processing_class)
        return made

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


def test_synced_reference_is_resumed(make, tmp_path):
    def run(steps: int, resume: str | None = None) -> GRPOTrainer:
        trainer = make(
            sync_ref_model=True, ref_model_sync_steps=2, max_steps=steps,
            save_strategy="steps", save_steps=3,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    straight = run(6)
    checkpoint = tmp_path / "checkpoint-3"
    shutil.copytree(tmp_path / "out" / "checkpoint-3", checkpoint)
    shutil.rmtree(tmp_path / "out")
    resumed = run(6, str(checkpoint))
    assert torch.equal(parameters(straight.ref_model), parameters(resumed.ref_model))
    assert torch.equal(parameters(straight.model), parameters(resumed.model))
    with pytest.raises(ValueError, match="sync_ref_model"):
        make(max_steps=6).train(resume_from_checkpoint=str(checkpoint))


def test_wrong_settings(make_args):
    with pytest.raises(ValueError, match="sync_ref_model: expected False with beta=0"):
        make_args(sync_ref_model=True)
    with pytest.raises(ValueError, match="ref_model_sync_steps: expected an integer >= 1"):
        make_args(beta=0.1, sync_ref_model=True, ref_model_sync_steps=0)
    with pytest.raises(ValueError, match="ref_model_mixup_alpha: expected"):
        make_args(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=1.5)


def test_a_model_whose_head_is_not_understood_is_refused(make_trainer, policy):
    head = policy.lm_head
    head.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(ValueError, match="its head is not supported"):
        make_trainer(model=policy)
