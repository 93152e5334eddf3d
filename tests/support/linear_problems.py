"""Problems for the native forward of a linear head, and their statistics in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.backends.cpu import rows as cpu
from grpo_kernels.head import Head, Transform

ISAS = [] if cpu.unavailable() else cpu.isas()
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)


def problem(
    tokens: int,
    depth: int,
    columns: int,
    dtype: torch.dtype,
    bias: bool = True,
    size: float = 1.0,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Head, Tensor]:
    """Return hidden states, a head whose logits have about standard deviation 3, and targets."""
    hidden = torch.randn(tokens, depth).to(dtype)
    weight = (3 * size * depth**-0.5 * torch.randn(columns, depth)).to(dtype)
    own_bias = torch.randn(columns).to(dtype) if bias else None
    target = torch.randint(columns, (tokens,))
    target[::2] = (hidden.double() @ weight.double().t())[::2].argmax(-1)
    hidden, weight, target = (x.to(device) for x in (hidden, weight, target))
    own_bias = own_bias.to(device) if own_bias is not None else None
    return hidden, Head(weight, own_bias, Transform()), target


def logits_of(hidden: Tensor, head: Head, precision: str, wide: torch.dtype) -> Tensor:
    """Return raw logits computed in ``wide``, rounded where ``precision`` says so."""
    logits = hidden.to(wide) @ head.weight.to(wide).t()
    if precision == "input":
        logits = logits.to(hidden.dtype)
    if head.bias is not None:
        logits = logits + head.bias.to(logits.dtype)
    return logits.to(wide)


def statistics(logits: Tensor, target: Tensor, transform: Transform) -> RowStats:
    """Return the statistics of raw logits in their dtype, differentiable."""
    temperature = transform.temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
    scores = transform.logit_scale * logits
    if transform.softcap is not None:
        scores = transform.softcap * torch.tanh(scores / transform.softcap)
    scores = scores / temperature
    logps = scores.log_softmax(-1)
    probs = logps.exp()
    return RowStats(
        logps.gather(-1, target[:, None])[:, 0],
        -(probs * torch.where(probs > 0, logps, 0.0)).sum(-1),
        scores.logsumexp(-1),
        logits.argmax(-1) == target,
        probs.square().sum(-1),
        scores.amax(-1),
        scores.amin(-1),
    )


def same(a: RowStats, b: RowStats) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)
