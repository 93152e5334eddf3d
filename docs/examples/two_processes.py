"""Two processes: the same steps as one process with the same generation batch.

Start it with ``torchrun --nproc-per-node 2 two_processes.py``, or ``accelerate launch``.
"""

from __future__ import annotations

import os
import sys

from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.demo.task import digits_reversal_reward


def main() -> None:
    if "WORLD_SIZE" not in os.environ:
        sys.exit(f"start it with: torchrun --nproc-per-node 2 {sys.argv[0]}")
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"{n}=", "answer": str(n)[::-1]} for n in range(100, 132)]
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),  # the same on both
        reward_funcs=digits_reversal_reward,
        args=GRPOConfig(
            output_dir="out/two_processes",
            per_device_train_batch_size=16,  # 32 completions over both
            num_generations=8,
            max_completion_length=4,
            learning_rate=2e-3,
            max_steps=4,
            logging_steps=2,
            ddp_backend="gloo",
            use_cpu=True,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        last = [row for row in trainer.state.log_history if "reward" in row][-1]
        processes = trainer.accelerator.num_processes
        print(f"final reward {last['reward']:.3f} on {processes} processes", flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
