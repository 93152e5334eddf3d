"""The fused head against eager full logits in fp64, on a rollout of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grpo_kernels import Head, LossConfig, TokenBatch, linear_policy_loss
from grpo_kernels.hf import add_fused_head
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import MicroBatch, Rollout, collate, decode_completions, encode_prompts
from grpo_trainer.demo.compare import EXACT, Loss, loss_and_gradients, relative
from grpo_trainer.demo.task import digits_reversal_reward
from grpo_trainer.engines import Sampling, TransformersEngine
from grpo_trainer.experience import compute_advantages


class Difference(NamedTuple):
    """Fused fp32 against eager fp64."""

    loss: float  # largest absolute difference
    gradient: float  # largest difference over the largest gradient, of hidden states and weight


def rollout_difference(model_folder: Path, dataset: Dataset, config: LossConfig) -> Difference:
    """Compare on a rollout of the policy in ``model_folder``, with the rewards that it got."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="float32")
    batch = _rollout(model, model_folder, dataset, config)
    add_fused_head(model)
    with torch.no_grad():
        hidden, weight = model(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, head_fn=_keep
        ).head
    return _difference(hidden, weight, batch.token_batch(1), config)


def _keep(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    return hidden, head.weight


def _rollout(
    model: PreTrainedModel, folder: Path, dataset: Dataset, config: LossConfig, group: int = 16
) -> MicroBatch:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = GRPOConfig(
        output_dir=str(folder), max_completion_length=config.max_completion_length or 1
    )
    rows = [row for row in dataset for _ in range(group)]
    prompts = [row["prompt"] for row in rows]
    prompt_ids = [prompt.ids for prompt in encode_prompts(prompts, tokenizer)]
    engine, sampling = (
        TransformersEngine(lambda: model, tokenizer),
        Sampling.from_config(args, tokenizer),
    )
    completion_ids = engine.generate(prompt_ids, sampling).token_ids
    completions = decode_completions(completion_ids, prompts, tokenizer)
    rewards = digits_reversal_reward(completions, [row["answer"] for row in rows])
    advantages = compute_advantages(torch.tensor(rewards)[:, None], torch.ones(1), group).advantages
    tokens = torch.tensor(float(sum(map(len, completion_ids))))
    made = zip(prompts, prompt_ids, completions, completion_ids, strict=True)
    rollouts = [Rollout(*fields) for fields in made]
    return collate(rollouts, advantages, tokens, tokens, tokenizer.pad_token_id or 0)


def _difference(
    hidden: Tensor, weight: Tensor, batch: TokenBatch, config: LossConfig
) -> Difference:
    def loss_by(backend: str) -> Loss:
        return lambda x, w, batch: linear_policy_loss(x, w, batch, config, backend=backend).loss

    ours = loss_and_gradients(loss_by("auto"), hidden, weight, batch)
    exact = loss_and_gradients(loss_by(EXACT), hidden.double(), weight.double(), batch)
    gradient = max(map(relative, ours[1:], exact[1:]))
    return Difference(float((ours[0].double() - exact[0]).abs()), gradient)
