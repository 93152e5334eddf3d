"""LoRA: only an adapter is trained and saved, and the model without it is the reference."""

from __future__ import annotations

from datasets import Dataset
from peft import LoraConfig, PeftModel

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.demo.task import digits_reversal_reward


def main() -> None:
    tokenizer = make_tokenizer()
    rows = [{"prompt": f"{n}=", "answer": str(n)[::-1]} for n in range(100, 132)]
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=digits_reversal_reward,
        args=GRPOConfig(
            output_dir="out/lora",
            overwrite_output_dir=True,
            beta=0.02,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=4,
            learning_rate=5e-3,
            max_steps=6,
            logging_steps=2,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    kl = [row["kl"] for row in trainer.state.log_history if "kl" in row]
    adapted = PeftModel.from_pretrained(make_policy(tokenizer, seed=0), "out/lora")
    trained = sum(p.numel() for name, p in adapted.named_parameters() if "lora" in name)
    print(f"KL to the model without the adapter {kl[0]:.4f} -> {kl[-1]:.4f}")
    print(f"final adapter of {trained} parameters in out/lora")


if __name__ == "__main__":
    main()
