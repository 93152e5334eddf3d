"""One batch for all trainers, and what loss and gradients it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.training.task import FIRST_WORD, SEED, TrainingConfig, make_model
from grpo_kernels import LossConfig, TokenBatch, policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LOSS = LossConfig(loss_type="dapo", epsilon=0.2)
_NOISE = 0.1  # of the old log-probabilities: no ratio comes near its bound, where rounding decides


@dataclass(frozen=True, kw_only=True)
class SharedBatch:
    """A prepared micro-batch of b sequences."""

    prompt_ids: Tensor  # (b, P)
    completion_ids: Tensor  # (b, C)
    advantages: Tensor  # (b,)
    old_logprobs: Tensor  # (b, C)
    num_items: float  # completion tokens of the whole step
    micro_batches: int  # of the step


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A batch and its loss and gradients in fp32, from full logits of the untouched model."""

    batch: SharedBatch
    loss: float
    gradients: dict[str, Tensor]


def make_reference(config: TrainingConfig, device: str) -> Reference:
    """Return the reference at the initial weights."""
    model = make_model(config).to(device)
    batch = make_batch(config, model, device)
    loss = 0.0
    for row in range(config.micro_batch):  # full logits of one sequence at a time
        part = _row_loss(model, batch, row)
        part.backward()
        loss += part.item()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return Reference(batch=batch, loss=loss, gradients=gradients)


def compare(model: PreTrainedModel, loss: Tensor, exact: Reference) -> dict[str, float]:
    """Return the relative errors of the loss and of the gradient of all weights together."""
    difference = total = 0.0
    for name, parameter in model.named_parameters():
        expected = exact.gradients[name]
        actual = torch.zeros_like(expected) if parameter.grad is None else parameter.grad
        difference += _square(actual - expected)
        total += _square(expected)
    return {
        "loss": abs(loss.item() - exact.loss) / abs(exact.loss),
        "gradient": (difference / total) ** 0.5,
    }


def make_batch(config: TrainingConfig, model: PreTrainedModel, device: str) -> SharedBatch:
    generator = torch.Generator().manual_seed(SEED)
    rows, prompt = config.micro_batch, config.prompt_tokens
    shape = rows, prompt + config.completion_tokens
    ids = torch.randint(FIRST_WORD, config.vocabulary, shape, generator=generator).to(device)
    with torch.no_grad():
        logprobs = torch.cat([_logprobs(model, row, prompt) for row in ids.split(1)])
    noise = (2 * torch.rand(logprobs.shape, generator=generator) - 1) * _NOISE
    return SharedBatch(
        prompt_ids=ids[:, :prompt],
        completion_ids=ids[:, prompt:],
        advantages=torch.linspace(-0.7, 1.7, rows, device=device),  # no mean of 0, so no loss of 0
        old_logprobs=logprobs + noise.to(device),
        num_items=float(config.tokens),
        micro_batches=config.micro_batches,
    )


def _row_loss(model: PreTrainedModel, batch: SharedBatch, row: int) -> Tensor:
    """Return one sequence's contribution to the loss."""
    prompt, completion = batch.prompt_ids[row], batch.completion_ids[row : row + 1]
    ids = torch.cat([prompt[None], completion], dim=1)
    tokens = TokenBatch.from_padded(
        completion,
        batch.advantages[row : row + 1],
        old_logprobs=batch.old_logprobs[row : row + 1],
        num_items_in_batch=batch.num_items,
    )
    return policy_loss(_logprobs(model, ids, len(prompt)).flatten(), tokens, _LOSS).loss


def _logprobs(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:  # (1, L) -> (1, C)
    logits = model(input_ids=ids).logits[:, prompt - 1 : -1]
    return logits.log_softmax(-1).gather(-1, ids[:, prompt:, None]).squeeze(-1)


def _square(x: Tensor) -> float:
    return torch.linalg.vector_norm(x, dtype=torch.float64).item() ** 2
