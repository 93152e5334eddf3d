"""Train on right answers in the right form: a script as its author wrote it for TRL."""

from datasets import load_dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    think_format_reward,
)

SYSTEM_PROMPT = "Think between <think> and </think>, then answer in a box."


def close_to_twenty(completions, **kwargs):
    return [-abs(20 - len(messages[0]["content"])) / 20 for messages in completions]


def as_conversation(row):
    return {
        "prompt": [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": row["problem"]},
        ]
    }


if __name__ == "__main__":
    dataset = load_dataset("json", data_files="problems.jsonl", split="train")
    dataset = dataset.map(as_conversation).remove_columns("problem")
    splits = dataset.train_test_split(test_size=4, seed=42)
    training_args = GRPOConfig(
        output_dir="maths",
        num_generations=2,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        max_completion_length=8,
        num_iterations=2,
        beta=0.04,
        scale_rewards=False,
        loss_type="dr_grpo",
        learning_rate=1e-3,
        epsilon_high=0.28,
        reward_weights=[1.0, 0.5, 0.1, 0.1, 1.0],
        mask_truncated_completions=False,
        log_completions=True,
        num_completions_to_print=1,
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    trainer = GRPOTrainer(
        model="model",
        reward_funcs=[
            accuracy_reward,
            think_format_reward,
            get_cosine_scaled_reward(max_len=8),
            get_repetition_penalty_reward(ngram_size=2, max_penalty=-0.5),
            close_to_twenty,
        ],
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
