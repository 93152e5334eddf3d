"""A saved model: trains the model in a save_pretrained folder, and saves it to such a folder.

A model's name on the hub works in the same place.
"""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer

BASE, TRAINED = Path("out/base"), Path("out/saved_model")


def zeros(completions, **kwargs):
    """Return the share of zeros."""
    return [text.count("0") / max(len(text), 1) for text in completions]


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(BASE)
    make_policy(tokenizer, seed=0).save_pretrained(BASE)

    trainer = GRPOTrainer(
        model=str(BASE),  # with its tokenizer
        reward_funcs=zeros,
        args=GRPOConfig(
            output_dir=str(TRAINED),
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=4,
            learning_rate=6e-3,
            max_steps=16,
            logging_steps=4,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
    )
    trainer.train()
    trainer.save_model()

    tokenizer = AutoTokenizer.from_pretrained(TRAINED)
    policy = AutoModelForCausalLM.from_pretrained(TRAINED)
    prompt = tokenizer("123=", return_tensors="pt")
    tokens = policy.generate(**prompt, max_new_tokens=4, do_sample=False)[0]
    print(f"greedily, from {TRAINED}: {tokenizer.decode(tokens)}")
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
