"""A small student learns from a larger model, on its own completions.

The teacher first learns from a reward; the student never sees a reward. The divergence over the
whole vocabulary is compared with the log-probabilities of only the sampled tokens.
"""

from __future__ import annotations

import copy
from typing import Any

from datasets import Dataset
from transformers import Qwen3ForCausalLM

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer

PROMPTS = Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)])


def even(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def run(name: str, model: Any, **settings: Any) -> GRPOTrainer:
    teacher = settings.pop("teacher", None)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=even,
        teacher=teacher,
        args=GRPOConfig(
            output_dir=f"out/distillation/{name}",
            overwrite_output_dir=True,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=4,
            learning_rate=3e-3,
            max_steps=40,
            logging_steps=5,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            **settings,
        ),
        train_dataset=PROMPTS,
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return trainer


def main() -> None:
    tokenizer = make_tokenizer()
    teacher = run("teacher", make_policy(tokenizer, seed=0)).model
    logs = {}
    for kind in ("reverse_kl", "logprobs"):
        small = copy.deepcopy(teacher.config)
        small.update({"hidden_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
        student = Qwen3ForCausalLM(small)
        # the reward is logged, but not trained on
        settings = {"teacher": teacher, "distillation": kind, "reward_weights": [0.0]}
        logs[kind] = run(kind, student, **settings).state.log_history
    print("step " + "".join(f"{kind:>26}" for kind in logs))
    for rows in zip(*logs.values(), strict=True):
        if "teacher_kl" in rows[0]:
            shown = [(row["teacher_kl"], row["rewards/even/mean"]) for row in rows]
            found = "".join(f"   KL {kl:6.3f}, reward {reward:.2f}" for kl, reward in shown)
            print(f"{rows[0]['step']:4} {found}")
    watched = [row["rewards/even/mean"] for row in logs["reverse_kl"] if "teacher_kl" in row]
    print("out/distillation/*/report.html have the curves")
    print(f"final reward {watched[-1]:.2f}, at first {watched[0]:.2f}")


if __name__ == "__main__":
    main()
