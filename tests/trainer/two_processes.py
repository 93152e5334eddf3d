"""Run by test_two_processes.py, alone and under torchrun: trains and saves what came out."""

from __future__ import annotations

import json
import os
import sys

import torch
from datasets import Dataset
from trainer_helpers import CannedEngine, parameters

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer

ROWS = 16  # completions of a generation batch, in two slices
METRICS = ("reward", "reward_std", "num_tokens", "entropy", "kl", "completions/min_length", "loss")


def reward(completion_ids, **kwargs):
    return [float(len(ids) + ids[0] % 3) for ids in completion_ids]


def main(file: str) -> None:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    tokenizer = make_tokenizer()
    args = GRPOConfig(
        output_dir=file + ".out",
        per_device_train_batch_size=ROWS // 2 // processes,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=4,
        max_steps=2,
        beta=0.05,
        optim="sgd",
        learning_rate=0.5,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=2,
        save_strategy="no",
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo" if processes > 1 else None,
        disable_tqdm=True,
    )
    dataset = Dataset.from_list([{"prompt": f"{i % 10}{i // 2}="} for i in range(12)])
    policy = make_policy(tokenizer, seed=0)
    trainer = GRPOTrainer(policy, reward, args, dataset, processing_class=tokenizer)
    first_row = trainer.accelerator.process_index * ROWS // processes
    trainer._collector._engine = CannedEngine(tokenizer, first_row)
    trainer.train()
    if trainer.is_world_process_zero():
        log = next(row for row in trainer.state.log_history if "loss" in row)
        torch.save(parameters(trainer.model), file + ".pt")
        with open(file + ".json", "w") as out:
            json.dump({name: log[name] for name in METRICS}, out)


if __name__ == "__main__":
    main(sys.argv[1])
