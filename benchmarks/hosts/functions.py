"""Hosts whose function for the head takes tensors: a step is one call of it and the backward."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from benchmarks.hosts.work import OURS, THEIRS, HostWork, Step
from benchmarks.training.task import SEED, TrainingConfig

_TEMPERATURE = 0.7


def _tensors(config: TrainingConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Make hidden states (b, C, D), a weight (V, D) and ids (b, C)."""
    g = torch.Generator().manual_seed(SEED)
    shape = config.micro_batch, config.completion_tokens
    hidden = torch.randn(*shape, config.hidden, generator=g)
    weight = torch.randn(config.vocabulary, config.hidden, generator=g) * config.hidden**-0.5
    ids = torch.randint(config.vocabulary, shape, generator=g)
    return hidden.requires_grad_(), weight.requires_grad_(), ids


def _liger(arm: str, config: TrainingConfig) -> Step:
    from liger_kernel.chunked_loss import grpo_loss

    from grpo_kernels.integrations import liger

    hidden, weight, ids = _tensors(config)
    advantages, mask = torch.linspace(-0.7, 1.7, len(ids)), torch.ones_like(ids)
    settings: dict[str, Any] = {"temperature": _TEMPERATURE, "beta": 0.0, "use_ref_model": False}
    with liger.enabled() if arm == OURS else nullcontext():
        module = grpo_loss.LigerFusedLinearGRPOLoss(**settings)
    return Step(lambda: module(hidden, weight, ids, mask, advantages)[0], (hidden, weight))


def _verl(arm: str, config: TrainingConfig) -> Step:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    from grpo_kernels.integrations import verl

    hidden, weight, ids = _tensors(config)
    scores = FusedLinearForPPO()

    def loss() -> Tensor:
        with verl.enabled() if arm == OURS else nullcontext():
            logprobs, entropy = scores(hidden, weight, ids, _TEMPERATURE)
        return (logprobs + 0.1 * entropy).mean()

    return Step(loss, (hidden, weight))


WORKS = (
    HostWork("liger-kernel", "LigerFusedLinearGRPOLoss", (THEIRS, OURS), _liger),
    HostWork("verl", "FusedLinearForPPO, entropy", (THEIRS, OURS), _verl),
)
