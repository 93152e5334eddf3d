"""A tiny model that is trained on ranks and in one process, its head called in several ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor

from grpo_kernels import FusedHead, PolicyLossOutput, TokenBatch, linear_policy_loss, policy_loss
from grpo_kernels.integrations import lazy_scorers
from grpo_kernels.testing import make_config

WIDTH, VOCAB, LENGTH, SEQUENCES = 16, 53, 6, 4  # sequences of a rank, in two micro-batches
STEPS, MICRO_BATCHES = 3, 2


class Tiny(nn.Module):
    """An embedding, a layer, a norm and a head."""

    def __init__(self, tied: bool = False, fused: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator).mul_(0.4)
        if tied:
            self.lm_head.weight = self.embed.weight
        if fused:
            self.lm_head = FusedHead(self.lm_head)

    def forward(self, ids: Tensor, loss_of: Callable[[nn.Module, Tensor], Any]) -> Any:
        hidden = self.norm(self.embed(ids) + torch.tanh(self.layer(self.embed(ids))))
        return loss_of(self.lm_head, hidden[:, :-1])


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What is different of a run."""

    head: Callable[[Any, Tensor, TokenBatch], PolicyLossOutput]
    outside: bool = False  # the head is called after the model's forward
    tied: bool = False
    prepare: Callable[[Tiny], None] = lambda model: None
    fused: bool = True


def fused_loss(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
    return head.policy_loss(hidden, batch, make_config("dapo"))


def held_loss(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
    return linear_policy_loss(hidden, head.weight, batch, make_config("dapo"))


def lazy_loss(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
    logp = head(hidden).logprobs(batch.target.view(hidden.shape[:-1]))
    return policy_loss(logp.flatten(), batch, make_config("dapo"))


def plain_loss(head: Any, hidden: Tensor, batch: TokenBatch) -> PolicyLossOutput:
    weight = head.weight.full_tensor() if isinstance(head.weight, DTensor) else head.weight
    return linear_policy_loss(hidden, weight, batch, make_config("dapo"))


def freeze(model: Tiny) -> None:
    model.lm_head.weight.requires_grad_(False)


def checkpoint(model: Tiny) -> None:
    model.layer = checkpoint_wrapper(model.layer)


def lazy(model: Tiny) -> None:
    lazy_scorers.defer_logits(SimpleNamespace(get_output_embeddings=lambda: model.lm_head))  # type: ignore[arg-type]


def adapt(model: Tiny) -> None:
    """Put PEFT's LoRA on the head, and on the layer."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(target_modules=["lm_head", "layer"], r=3, lora_alpha=6)
    inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(generator=generator).mul_(0.3)
    model.lm_head = FusedHead(model.lm_head)


def micro_batches(rank: int) -> Iterator[tuple[Tensor, TokenBatch]]:
    """Return a rank's micro-batches of every step."""
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            ids = torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=generator)
            advantages = torch.randn(SEQUENCES, generator=generator)
            tokens = float(SEQUENCES * (LENGTH - 1) * MICRO_BATCHES)
            yield ids, TokenBatch.from_padded(
                ids[:, 1:], advantages, num_items_in_batch=tokens,
                gradient_accumulation_steps=MICRO_BATCHES,
            )  # fmt: skip


def loss_of(
    model: Any, module: nn.Module, ids: Tensor, variant: Variant, batch: TokenBatch
) -> Tensor:
    """Run ``model``, which may be a wrapper of ``module``; all of its output meets the hooks."""
    if variant.outside:
        hidden = model(ids, lambda head, hidden: hidden.clone())
        return variant.head(module.lm_head, hidden, batch).loss
    return model(ids, lambda head, hidden: variant.head(head, hidden, batch)).loss


def train(model: Any, variant: Variant, ranks: list[int]) -> list[dict[str, Tensor]]:
    """Return the gradients of every step, of one rank or the mean of several in one process."""
    trained = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3)
    found = []
    of_ranks = [list(micro_batches(rank)) for rank in ranks]
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO_BATCHES):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(micro == MICRO_BATCHES - 1)
            for batches in of_ranks:
                ids, batch = batches[step * MICRO_BATCHES + micro]
                loss = loss_of(model, model, ids, variant, batch)
                (loss / len(ranks)).backward()
        named = model.named_parameters()
        found.append({n: whole(x.grad) for n, x in named if x.grad is not None})
        optimizer.step()
    return found


def whole(x: Any) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).clone()
