"""Forward passes of a model that has :func:`grpo_kernels.hf.add_fused_head`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels import (
    Head,
    LossConfig,
    Metrics,
    TokenBatch,
    linear_logprobs,
    linear_policy_loss,
)
from grpo_kernels.fused_head import HeadFn
from grpo_trainer.data import MicroBatch


def policy_loss_of(
    model: nn.Module,
    batch: MicroBatch,
    tokens: TokenBatch,
    config: LossConfig,
    options: dict[str, Any],
    with_router_loss: bool = False,
) -> tuple[Tensor, Metrics, Tensor | None]:
    """Return the policy loss of ``batch`` with ``tokens``, its metrics, and the routers' loss.

    ``options`` are those of ``linear_policy_loss``.
    """
    metrics: list[Metrics] = []

    def head_fn(hidden: Tensor, head: Head) -> Tensor:
        loss, of_loss = linear_policy_loss(hidden, head, tokens, config, **options)
        metrics.append(of_loss)
        return loss

    more = {"output_router_logits": True} if with_router_loss else {}
    output = _run(model, batch, head_fn, **more)
    return output.head, metrics[-1], output.aux_loss


def target_logprobs(model: nn.Module, batch: MicroBatch, temperature: float) -> Tensor:
    """Return log-probabilities of the batch's targets, (B, L), without dropout or gradient.

    With sampling masks they are renormalised over them, as the loss takes them.
    """
    output = "logprobs" if batch.sampling_mask is None else "masked_logprobs"

    def head_fn(hidden: Tensor, head: Head) -> Tensor:
        outputs = linear_logprobs(
            hidden,
            head,
            batch.target,
            temperature=temperature,
            outputs=(output,),
            sampling_mask=batch.sampling_mask,
        )
        logprobs = getattr(outputs, output)
        assert logprobs is not None  # it was asked for
        return logprobs

    with evaluating(model):
        return _run(model, batch, head_fn).head


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run ``model`` without dropout and gradient; afterwards it is in the mode it was in."""
    was_training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(was_training)


def _run(model: nn.Module, batch: MicroBatch, head_fn: HeadFn, **options: Any) -> Any:
    return model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        head_fn=head_fn,
        **batch.inputs,
        **options,
    )
