"""LoRA: only an adapter is trained and saved; the model without it is the reference."""

from __future__ import annotations

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer


def zeros(completions, **kwargs):
    """Return the share of zeros."""
    return [text.count("0") / max(len(text), 1) for text in completions]


def make_base(tokenizer):
    policy = make_policy(tokenizer, seed=0)
    with torch.no_grad():
        policy.lm_head.weight.mul_(8)  # peaked, like a trained policy
    return policy


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_base(tokenizer),
        reward_funcs=zeros,
        args=GRPOConfig(
            output_dir="out/lora",
            overwrite_output_dir=True,
            beta=0.02,
            per_device_train_batch_size=64,
            num_generations=8,
            max_completion_length=4,
            learning_rate=5e-3,
            max_steps=24,
            logging_steps=3,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    adapted = PeftModel.from_pretrained(make_base(tokenizer), "out/lora")
    trained = sum(p.numel() for name, p in adapted.named_parameters() if "lora" in name)
    print(f"KL to the model without the adapter {kl[0]:.4f} -> {kl[-1]:.4f}")
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(f"adapter with {trained} parameters in out/lora")
    print(f"final reward {rewards[-1]:.3f}, at first {rewards[0]:.3f}")


if __name__ == "__main__":
    main()
