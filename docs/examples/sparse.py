"""The head's sparse backward compared with the exact backward: what it skips, and how it learns.

With ``backward_exact_weight=False`` the head's own gradient is also sampled. AdamW then takes
longer steps for rare ids: the reward rises later, and entropy stays higher.
"""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer

SEEDS = (0,)  # use more seeds for a clearer result
GRADIENTS = {
    "exact": {},
    "sparse, head exact": dict(backward="sparse"),
    "sparse": dict(backward="sparse", backward_exact_weight=False),
}


def even(completion_ids, **kwargs):
    """Return the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def train(seed: int, **settings: Any) -> list[dict[str, float]]:
    """Return what was logged; all gradients share a seed's policy and data."""
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer, seed=seed)
    policy.resize_token_embeddings(1000, mean_resizing=False)  # adds ids without text
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)  # peaked, like a trained policy
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=even,
        args=GRPOConfig(
            output_dir="out/sparse",
            overwrite_output_dir=True,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=4,
            learning_rate=1e-3,
            max_steps=16,
            logging_steps=4,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            seed=seed,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
        processing_class=tokenizer,
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    for seed in SEEDS:
        for name, settings in GRADIENTS.items():
            rows = train(seed, **settings)
            rewards = [row["reward"] for row in rows]
            print(f"seed {seed}, {name}: reward over all steps {sum(rewards) / len(rows):.3f}")
            for row in rows:
                if "backward_entries" in row:
                    print(
                        f"  step {row['step']}: {row['backward_entries']:.0f} of 1000 entries per "
                        f"token, {row['backward_whole_rows']:.0%} of tokens exact, "
                        f"relative error {row['backward_error']:.1e}"
                    )
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
