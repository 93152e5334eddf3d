"""A tolerance for the head's backward: the entries that matter, and what was left out."""

from __future__ import annotations

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer


def even(completion_ids, **kwargs):
    """Return the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main() -> None:
    torch.set_num_threads(1)  # so small a model gains nothing from more, and waits for them
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer, seed=0)
    policy.resize_token_embeddings(1000, mean_resizing=False)  # ids without a text
    with torch.no_grad():
        policy.lm_head.weight.mul_(20)  # peaked, as a policy that was trained
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=even,
        args=GRPOConfig(
            output_dir="out/bounded",
            backward_tolerance=2e-3,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=4,
            learning_rate=1e-3,
            max_steps=16,
            logging_steps=4,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
        processing_class=tokenizer,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "backward_entries" in row]
    for row in rows:
        print(
            f"step {row['step']}: {row['backward_entries']:.0f} of 1000 entries a token, "
            f"{row['backward_whole_rows']:.0%} of the tokens whole, "
            f"relative error {row['backward_error']:.1e}"
        )
    print(f"final reward {rows[-1]['reward']:.3f}, at first {rows[0]['reward']:.3f}")


if __name__ == "__main__":
    main()
