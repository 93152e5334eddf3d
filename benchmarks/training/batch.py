"""One batch for all trainers, and what loss and gradient it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.check import StepResult, take_gradient
from benchmarks.training.task import FIRST_WORD, SEED, TrainingConfig, make_model
from grpo_kernels import LossConfig, TokenBatch, policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
_NOISE = 0.1  # of the old log-probabilities: no ratio comes near its bound, where rounding decides
Batch = dict[str, Tensor]  # a prepared micro-batch, as TRL's ``compute_loss`` takes it


def make_reference(config: TrainingConfig, device: str) -> tuple[Batch, StepResult]:
    """Return a batch, and its loss and gradient in fp32: full logits of the untouched model."""
    model = make_model(config).to(device)
    batch = make_batch(config, model, device)
    loss = torch.zeros((), device=device)
    for row in range(config.micro_batch):  # full logits of one sequence at a time
        part = _row_loss(model, batch, slice(row, row + 1))
        part.backward()
        loss += part.detach()
    return batch, (loss, take_gradient(model.parameters()))


def make_batch(config: TrainingConfig, model: PreTrainedModel, device: str) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    rows, prompt = config.micro_batch, config.prompt_tokens
    shape = rows, prompt + config.completion_tokens
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator).to(device)
    prompts, completions = ids[:, :prompt], ids[:, prompt:]
    with torch.no_grad():
        logprobs = torch.cat([_logprobs(model, row, prompt) for row in ids.split(1)])
    noise = (2 * torch.rand(logprobs.shape, generator=generator) - 1) * _NOISE
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": torch.ones_like(completions),
        "advantages": torch.linspace(-0.7, 1.7, rows, device=device),  # no mean of 0: no loss of 0
        "old_per_token_logps": logprobs + noise.to(device),
        "num_items_in_batch": torch.tensor(float(config.tokens), device=device),  # of the step
    }


def _row_loss(model: PreTrainedModel, batch: Batch, row: slice) -> Tensor:
    """Return one sequence's contribution to the loss."""
    prompt, completion = batch["prompt_ids"][row], batch["completion_ids"][row]
    logprobs = _logprobs(model, torch.cat([prompt, completion], dim=1), prompt.shape[1])
    tokens = TokenBatch.from_padded(
        completion,
        batch["advantages"][row],
        old_logprobs=batch["old_per_token_logps"][row],
        num_items_in_batch=batch["num_items_in_batch"],
    )
    return policy_loss(logprobs.flatten(), tokens, _LOSS).loss


def _logprobs(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:  # (1, L) -> (1, C)
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)
