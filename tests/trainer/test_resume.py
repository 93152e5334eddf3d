from __future__ import annotations

import copy
import shutil

import pytest
import torch
from trainer_helpers import parameters


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 3},  # step 4 is in the middle of a generation
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3, "beta": 0.1},
        {"generation_batch_size": 48, "num_generations": 4},  # epochs of 24 steps, half a dataset
    ],
)
def test_resume_gives_the_same_parameters(make_trainer, policy, tmp_path, changes):
    def run(steps: int, resume: str | None = None) -> torch.Tensor:
        trainer = make_trainer(
            model=copy.deepcopy(policy),
            max_steps=steps,
            save_strategy="steps",
            save_steps=4,
            lr_scheduler_type="constant",
            **changes,
        )
        trainer.train(resume_from_checkpoint=resume)
        assert trainer.state.global_step == steps
        return parameters(trainer.model)

    straight = run(7)
    checkpoint = tmp_path / "checkpoint-4"
    shutil.copytree(tmp_path / "out" / "checkpoint-4", checkpoint)
    shutil.rmtree(tmp_path / "out")
    assert torch.equal(run(7, str(checkpoint)), straight)


def test_resume_in_a_later_epoch(make_trainer, policy, tmp_path):
    def prompts(steps: int, resume: str | None = None) -> list[str]:
        seen = []

        def reward(prompts, **kwargs):
            seen.append(prompts[0])
            return [0.0] * len(prompts)

        settings = dict(max_steps=steps, save_strategy="steps", save_steps=30)
        trainer = make_trainer(reward, copy.deepcopy(policy), **settings)
        trainer.train(resume_from_checkpoint=resume)
        return seen

    straight = prompts(35)  # 25 prompts an epoch
    assert sorted(straight[:10]) != sorted(straight[25:])
    assert prompts(35, str(tmp_path / "out" / "checkpoint-30")) == straight[30:]


def test_other_number_of_processes(make_trainer, policy, tmp_path):
    make_trainer(max_steps=1, save_strategy="steps", save_steps=1).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    (checkpoint / "rollouts_0.pt").unlink()
    with pytest.raises(ValueError, match=r"expected rollouts_0\.pt"):
        make_trainer(max_steps=2).train(resume_from_checkpoint=str(checkpoint))


def test_train_twice_starts_again(make_trainer):
    trainer = make_trainer(num_iterations=2, max_steps=3)
    trainer.train()
    trainer.train()
    assert trainer._position == 3
