"""A custom loss: a few lines of torch with settings, registered under a name.

You write no derivative: autograd derives it, and on a GPU the Triton kernel is generated from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from datasets import Dataset

from grpo_kernels.losses import NamedLoss, Surrogate, register_loss
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer


@dataclass(frozen=True, kw_only=True)
class PenalizedRatio(Surrogate):
    """The advantage times the ratio, minus a penalty on the ratio's distance from 1.

    Args:
        penalty: weight of the penalty.
    """

    penalty: float = 2.5

    def __call__(self, terms):
        away = (terms.ratio - 1).square()
        return -terms.ratio * terms.advantages + self.penalty * away


def zeros(completions, **kwargs):
    """Return the share of zeros."""
    return [text.count("0") / max(len(text), 1) for text in completions]


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    register_loss(
        "penalized",
        NamedLoss(surrogate=PenalizedRatio, aggregation="window_token_mean", source="this example"),
    )
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"{n}="} for n in range(100, 132)]
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=zeros,
        args=GRPOConfig(
            output_dir="out/custom_loss",
            loss_type="penalized",
            loss_kwargs={"penalty": 2.0},
            num_iterations=2,  # so that the ratio is not always 1
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=4,
            learning_rate=6e-3,
            max_steps=32,
            logging_steps=8,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
