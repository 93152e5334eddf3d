"""The trainer with custom rewards: a plain function, and an async function that waits for a judge.

They also log: one a metric, the other a column in the table of completions.
"""

from __future__ import annotations

import asyncio

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.rewards import text_of


def right_digits(completions, answer, log_metric, **kwargs):
    """Return the share of correct digits."""
    scores = [
        sum(a == b for a, b in zip(text, right, strict=False)) / len(right)
        for text, right in zip(map(text_of, completions), answer, strict=True)
    ]
    log_metric("right_digits/best", max(scores))  # averaged until it is logged
    return scores


async def judged(completions, log_extra, **kwargs):
    """Score like a judge on a network: all completions at once, in parallel with other rewards."""

    async def judge(text):
        await asyncio.sleep(0)
        return 1.0 if len(text) == 3 else None  # None: does not apply

    scores = await asyncio.gather(*(judge(text_of(completion)) for completion in completions))
    log_extra("judge", ["three digits" if score else "-" for score in scores])
    return scores


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tokenizer()
    numbers = [f"{n:03d}" for n in range(100, 164)]
    rows = [{"prompt": f"{number}=", "answer": number[::-1]} for number in numbers]
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=[right_digits, judged],
        args=GRPOConfig(
            output_dir="out/custom_reward",
            overwrite_output_dir=True,
            reward_weights=[1.0, 0.2],
            per_device_train_batch_size=256,
            num_generations=16,
            max_completion_length=4,
            learning_rate=3e-3,
            max_steps=40,
            logging_steps=8,
            log_completions=True,
            num_completions_to_print=3,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()  # with a model card
    first, *_, last = [row for row in trainer.state.log_history if "reward" in row]
    print(f"best digits {last['right_digits/best']:.3f}")
    print(f"final reward {last['reward']:.3f}, at first {first['reward']:.3f}")


if __name__ == "__main__":
    main()
