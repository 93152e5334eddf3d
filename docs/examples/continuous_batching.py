"""A custom engine: transformers' continuous batching, with log-probabilities.

When a completion is finished, the next one takes its room in a paged cache.
"""

from __future__ import annotations

import torch
from datasets import Dataset
from transformers.generation import ContinuousBatchingConfig

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.data import has_images
from grpo_trainer.demo.policy import make_policy, make_tokenizer
from grpo_trainer.engines import (
    Completions,
    TransformersEngine,
    cut_after_eos,
    register_rollout_engine,
)

BATCHING = ContinuousBatchingConfig(return_logprobs=True, num_blocks=64, max_batch_tokens=64)


class ContinuousBatching(TransformersEngine):
    """Completes text prompts with ``generate_batch``."""

    def complete(self, model, prompt_ids, sampling, images) -> Completions:
        if has_images(images) or self.in_step:
            raise ValueError("rollout_engine: expected text, and ds3_gather_for_generation=True")
        outputs = model.generate_batch(
            prompt_ids,
            generation_config=self.generation_config(sampling),
            continuous_batching_config=BATCHING,
            progress_bar=False,
        ).values()  # in prompt order
        failed = [output.error for output in outputs if output.error is not None]
        if failed or len(outputs) != len(prompt_ids):  # the cache may be full
            raise ValueError(f"rollout_engine: of {len(prompt_ids)} prompts failed: {failed}")
        ids = [cut_after_eos(output.generated_tokens, sampling.eos_token_ids) for output in outputs]
        logprobs = [output.logprobs[: len(row)] for output, row in zip(outputs, ids, strict=True)]
        return Completions(ids, logprobs)


def zeros(completions, **kwargs):
    """Return the share of zeros."""
    return [text.count("0") / max(len(text), 1) for text in completions]


def main() -> None:
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    register_rollout_engine("continuous_batching", ContinuousBatching)
    tokenizer = make_tokenizer()
    trainer = GRPOTrainer(
        model=make_policy(tokenizer, seed=0),
        reward_funcs=zeros,
        args=GRPOConfig(
            output_dir="out/continuous_batching",
            rollout_engine="continuous_batching",
            per_device_train_batch_size=64,
            max_completion_length=4,
            learning_rate=6e-3,
            max_steps=16,
            logging_steps=8,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n}="} for n in range(100, 132)]),
        processing_class=tokenizer,
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "reward" in row]
    apart = max(row["sampling/sampling_logp_difference/max"] for row in rows)
    print(f"the engine's log-probabilities differ by at most {apart:.1e} nats")
    print(f"final reward {rows[-1]['reward']:.3f}, at first {rows[0]['reward']:.3f}")


if __name__ == "__main__":
    main()
