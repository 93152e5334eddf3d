"""The fused head against eager full logits in fp64, on a rollout of the policy."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_kernels import LossConfig, TokenBatch
from grpo_kernels.testing import relative_error
from grpo_trainer.demo.compare import EXACT, fused, loss_and_gradients
from grpo_trainer.demo.task import digits_reversal_reward


def rollout_difference(
    folder: Path, dataset: Dataset, config: LossConfig, group: int = 16
) -> tuple[float, float]:
    """Compare on a rollout of the policy in ``folder``, with the rewards that it got.

    Returns:
        The difference of the losses, and the largest one over the largest gradient, of hidden
        states and weight.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    rows = [row for row in dataset for _ in range(group)]
    prompts = tokenizer([row["prompt"] for row in rows], return_tensors="pt").input_ids
    start = prompts.shape[1]  # they have one length
    with torch.no_grad():
        sampled = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=config.max_completion_length,
            do_sample=True,
            top_k=0,
        )
        hidden = model.model(sampled).last_hidden_state[:, start - 1 : -1]
    completions = sampled[:, start:]
    ends = (completions == tokenizer.eos_token_id).long()
    texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
    rewards = torch.tensor(digits_reversal_reward(texts, [row["answer"] for row in rows]))
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    advantages = centred / (grouped.std(1, keepdim=True) + 1e-4)
    until_end = ends.cumsum(1) == ends  # before the first end, and that
    batch = TokenBatch.from_padded(completions, advantages.flatten(), until_end)
    weight = model.lm_head.weight
    ours = loss_and_gradients(fused(config), hidden, weight, batch)
    exact = loss_and_gradients(fused(config, EXACT), hidden.double(), weight.double(), batch)
    gradient = max(map(relative_error, ours[1:], exact[1:]))
    return float((ours[0].double() - exact[0]).abs()), gradient
