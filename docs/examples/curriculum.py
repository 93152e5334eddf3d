"""A curriculum: the prompt sets the number of zeros to write, and raises it once it is learned."""

from __future__ import annotations

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer

ENOUGH = 0.7  # mean reward at which a prompt counts as learned
MOST = 5


def zeros_reward(prompts, completions, **kwargs):
    """Return 1 for the number of zeros in the prompt, which the curriculum rewrites."""
    counts = [int(prompt.rstrip("=")) for prompt in prompts]
    return [
        text[:count].count("0") / max(count, len(text))
        for text, count in zip(completions, counts, strict=True)
    ]


class MoreWhenReady:
    """Asks for one more zero once the current number is learned."""

    def __init__(self) -> None:
        self.zeros = 1

    def __call__(self, prompts, completions, rewards, metas):
        """Return one prompt per completion; its row in ``metas`` has the completed prompt."""
        asked = f"{self.zeros}="
        current = [r for r, row in zip(rewards, metas, strict=True) if row["prompt"] == asked]
        if current and sum(current) / len(current) > ENOUGH:
            self.zeros = min(self.zeros + 1, MOST)
            print(f"asks for {self.zeros} zeros")
        return [f"{self.zeros}="] * len(prompts)


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=zeros_reward,
        args=GRPOConfig(
            output_dir="out/curriculum",
            dynamic_prompts_fn=MoreWhenReady(),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=MOST + 1,
            learning_rate=1e-2,
            max_steps=48,
            logging_steps=12,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "1="}] * 8),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
