"""Tool calling: a policy that knows the format of calls learns to make the right call.

The tokenizer has a token for each part of a call, and short supervised training teaches the policy
the format, with random numbers. It learns what to add only from the reward.
"""

from __future__ import annotations

import random

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tool_tokenizer

WORDS = [
    '<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>",
    "add", "+", *"0123456789",
]  # fmt: skip
LARGEST = 3
SHOWN_STEPS, STEPS = 200, 50


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def sum_reward(prompts, completions, **kwargs):
    """Return 1/3 for each correct number in the single call, and 1/3 for the correct answer."""
    scores = []
    for prompt, messages in zip(prompts, completions, strict=True):
        a, b = map(int, prompt[0]["content"].split("+"))
        calls = messages[0].get("tool_calls", ())
        asked = calls[0]["function"]["arguments"] if len(calls) == 1 else {}
        answered = messages[-1]["content"] == str(a + b)
        scores.append((answered + (asked.get("a") == a) + (asked.get("b") == b)) / 3)
    return scores


def show_the_format(policy, tokenizer) -> None:
    """Run supervised steps on conversations with calls that add other numbers."""
    numbers = random.Random(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for _ in range(SHOWN_STEPS):
        texts = []
        for _ in range(32):
            x, y, a, b = (numbers.randint(1, LARGEST) for _ in range(4))
            call = {"name": "add", "arguments": {"a": a, "b": b}}
            turns = [
                {"role": "user", "content": f"{x}+{y}"},
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "content": str(a + b)},
                {"role": "assistant", "content": str(a + b)},
            ]
            texts.append(tokenizer.apply_chat_template(turns, tools=[add], tokenize=False))
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
        loss = policy(batch.input_ids, attention_mask=batch.attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    tokenizer = make_tool_tokenizer(WORDS)
    policy = make_policy(tokenizer, seed=0)
    show_the_format(policy, tokenizer)
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    prompts = [[{"role": "user", "content": f"{a}+{b}"}] for a, b in pairs]
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=sum_reward,
        args=GRPOConfig(
            output_dir="out/tools",
            max_tool_calling_iterations=1,
            per_device_train_batch_size=288,
            num_generations=32,
            max_completion_length=12,
            learning_rate=2e-3,
            entropy_coef=0.01,
            max_steps=STEPS,
            logging_steps=STEPS // 10,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        tools=[add],
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    print(f"calls per completion {rows[-1]['tools/call_frequency']:.2f}")
    print(f"final reward {rows[-1]['reward']:.3f}, at first {rows[0]['reward']:.3f}")


if __name__ == "__main__":
    main()
