"""Run by test_killed.py: starts a run per way to die, and ends it there by SIGKILL."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.checkpoint import files
from grpo_trainer.demo.policy import make_policy, make_tokenizer

# of 8 steps, with checkpoints at 3 and 6: when the run dies, and what it resumes from then
DEATHS = {"generation": 3, "step": 3, "save": 3, "before rename": 3, "deletion": 6}


def noisy_reward(completion_ids, **kwargs):
    noise = random.random() + np.random.random()
    return [noise * (len(ids) + ids[0] % 3 + ids[-1] % 5) for ids in completion_ids]


def trainer(folder: Path) -> GRPOTrainer:
    args = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=2,
        steps_per_generation=2,  # step 3 is in the middle of a generation batch
        max_completion_length=4,
        max_steps=8,
        dynamic_sampling=True,
        use_adaptive_entropy=True,
        entropy_target=5.0,
        beta=0.05,
        learning_rate=1e-2,
        logging_steps=2,  # step 3 is in the middle of a window
        save_steps=3,
        save_total_limit=1,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    tokenizer = make_tokenizer()
    dataset = Dataset.from_list([{"prompt": f"{i}="} for i in range(11)])
    policy = make_policy(tokenizer, seed=0)
    return GRPOTrainer(policy, noisy_reward, args, dataset, processing_class=tokenizer)


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(death: str, folder: Path) -> None:
    dying = trainer(folder)
    if death == "generation":
        head = dying.model.lm_head
        head.register_forward_hook(lambda *_: die() if dying.state.global_step == 4 else None)
    elif death == "step":
        dying.add_callback(_Later(5, die))
    elif death == "save":
        dying.add_callback(_Later(5, lambda: setattr(torch, "save", _half_a_file)))
    elif death == "before rename":
        dying.add_callback(_Later(5, lambda: setattr(files, "_publish", die)))
    elif death == "deletion":
        dying.add_callback(_Later(5, lambda: setattr(shutil, "rmtree", _half_a_folder)))
    dying.train()


class _Later(TrainerCallback):
    """Does something in the middle of the step after ``step``."""

    def __init__(self, step: int, action: Any) -> None:
        self._step, self._action = step, action

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._action()


def _half_a_file(value: Any, path: Any, **kwargs: Any) -> None:
    Path(path).write_bytes(b"half of it")
    die()


def _half_a_folder(path: Any, **kwargs: Any) -> None:
    files = [file for file in Path(path).rglob("*") if file.is_file()]
    if files:
        files[0].unlink()
        die()


def main(folder: Path) -> None:
    for death in DEATHS:
        child = os.fork()
        if child == 0:
            run(death, folder / death)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, death


if __name__ == "__main__":
    main(Path(sys.argv[1]))
