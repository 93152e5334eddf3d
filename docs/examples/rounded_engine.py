"""DPPO's trust region compared with DAPO's clipping, with an engine that computes in bf16.

The engine samples from a rounded copy of the policy, and reports its own log-probabilities, as fast
engines do. DAPO computes ratios with the policy's log-probabilities; DPPO uses the engine's, and
drops tokens if their probability has moved too far.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import Completions, RolloutEngine, Sampling

SEEDS = (0,)  # use more seeds for a clearer result
LOSSES = {
    "dapo": {"vllm_importance_sampling_correction": False},
    "dppo_tv": {},
}


class RoundedEngine(RolloutEngine):
    """Samples token by token from a copy of the policy in bf16."""

    def __init__(self, policy: torch.nn.Module) -> None:
        self._copy = copy.deepcopy(policy).to(torch.bfloat16).eval()

    def update_weights(self, weights: Any) -> None:
        own = dict(self._copy.named_parameters())
        with torch.no_grad():
            for name, weight in weights():
                own[name].copy_(weight)

    @torch.no_grad()
    def generate(self, prompt_ids: list[list[int]], sampling: Sampling) -> Completions:
        ids, logprobs = torch.tensor(prompt_ids), []  # prompts of equal length
        start, (end,) = ids.shape[1], sampling.eos_token_ids
        for _ in range(sampling.max_tokens):
            scores = self._copy(ids).logits[:, -1] / sampling.temperature
            logp = scores.log_softmax(-1)
            token = logp.float().exp().multinomial(1)
            logprobs.append(logp.gather(1, token))
            ids = torch.cat([ids, token], 1)
        tokens, known = ids[:, start:].tolist(), torch.cat(logprobs, 1).tolist()
        lengths = [row.index(end) + 1 if end in row else len(row) for row in tokens]
        rows = zip(tokens, known, lengths, strict=True)
        cut = [(row[:length], values[:length]) for row, values, length in rows]
        return Completions(*map(list, zip(*cut, strict=True)))


def even(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Return the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def train(loss_type: str, seed: int) -> list[dict[str, float]]:
    """Return what was logged."""
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer, seed=seed)
    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=even,
        args=GRPOConfig(
            output_dir="out/rounded",
            overwrite_output_dir=True,
            loss_type=loss_type,
            per_device_train_batch_size=16,
            steps_per_generation=4,
            num_generations=8,
            max_completion_length=6,
            learning_rate=3e-3,
            max_steps=40,
            logging_steps=10,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            seed=seed,
            **LOSSES[loss_type],
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
        processing_class=tokenizer,
        rollout_engine=RoundedEngine(policy),
    )
    trainer.train()
    return [row for row in trainer.state.log_history if "reward" in row]


def main() -> None:
    for loss_type in LOSSES:
        for seed in SEEDS:
            rows = train(loss_type, seed)
            curve = "  ".join(f"{row['reward']:.2f}" for row in rows)
            apart = rows[-1]["sampling/sampling_logp_difference/mean"]
            print(f"{loss_type:8} seed {seed}: reward {curve}; engine off by {apart:.4f} nats")
    print(f"final reward {rows[-1]['reward']:.2f}, at first {rows[0]['reward']:.2f}")


if __name__ == "__main__":
    main()
