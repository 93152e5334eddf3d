"""Train on the length of completions: a script as its author wrote it for TRL."""

from datasets import load_dataset

from grpo_trainer import GRPOConfig, GRPOTrainer


def close_to_twenty(completions, **kwargs):
    return [-abs(20 - len(completion)) / 20 for completion in completions]


if __name__ == "__main__":
    dataset = load_dataset("json", data_files="prompts.jsonl", split="train")
    training_args = GRPOConfig(
        output_dir="plain",
        num_generations=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        beta=0.04,
        scale_rewards=False,
        loss_type="dr_grpo",
        learning_rate=1e-3,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model="model",
        reward_funcs=close_to_twenty,
        args=training_args,
        train_dataset=dataset,
    )
    trainer.train()
    trainer.save_model()
