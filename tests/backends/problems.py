"""Problems for kernels of rows of logits, and what plain torch says about them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_kernels.backends import RowStats, StatsGrad
from grpo_kernels.backends.base import EXTRAS, STATS
from grpo_kernels.head import Head, Transform
from tests.net import oracle

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)

PLAIN = Transform()
# scale, softcap and temperature; None: one for each row
TRANSFORMS: dict[str, tuple[float, float | None, float | None]] = {
    "plain": (1.0, None, 1.0),
    "temperature": (1.0, None, 0.7),
    "scale": (0.25, None, 1.3),
    "softcap": (1.0, 5.0, 1.0),
    "all": (1.5, 20.0, 0.6),
    "per row": (1.0, None, None),
    "per row, capped": (1.0, 25.0, None),
}


def transform_of(name: str, rows: int, device: torch.device) -> Transform:
    scale, softcap, temperature = TRANSFORMS[name]
    each = torch.logspace(-1, 2, rows, device=device)
    return Transform(scale, softcap, each if temperature is None else temperature)


def random_rows(
    rows: int, columns: int, dtype: torch.dtype = FP32, spread: float = 4.0
) -> tuple[Tensor, Tensor]:
    """Return logits (rows, columns) and targets, every other of them the largest."""
    logits = (spread * torch.randn(rows, columns)).to(dtype)
    target = torch.randint(columns, (rows,))
    target[::2] = logits[::2].float().argmax(-1)
    return logits, target


def _moved(by: list[float], from_largest: bool = False) -> tuple[Tensor, Tensor]:
    """Return rows whose targets are moved, from where they are or from the largest logit."""
    logits, target = random_rows(len(by), 1007, spread=1.0)
    each = torch.arange(len(by))
    start = logits.amax(-1) if from_largest else logits[each, target]
    logits[each, target] = start + torch.tensor(by)
    return logits, target


def _offset(size: float) -> tuple[Tensor, Tensor]:
    logits, target = random_rows(6, 5003)
    return logits + torch.tensor([[size], [-size]]).repeat(3, 1), target


def _absent() -> tuple[Tensor, Tensor]:
    """Return rows with columns of -inf: every second, a whole first tile, all but one."""
    logits, _ = random_rows(3, 2 * 4096 + 5)
    logits[0, ::2] = -math.inf
    logits[1, :4096] = -math.inf
    logits[2, :-1] = -math.inf
    return logits, torch.tensor([1, 5000, 2 * 4096 + 4])


SPECIAL_ROWS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "flat": lambda: (torch.zeros(2, 1007), torch.tensor([0, 1006])),
    "offset by 150": lambda: _offset(150.0),
    "offset by 1e4": lambda: _offset(1e4),
    "nearly certain": lambda: _moved([10.0, 12.0, 16.6, 20.0, 60.0, 200.0], from_largest=True),
    "improbable": lambda: _moved([-30.0, -60.0, -69.0, -85.0, -120.0]),
    "rising": lambda: (torch.linspace(-300, 40, 20011).repeat(2, 1), torch.tensor([20010, 19000])),
    "absent columns": _absent,
}


def head_problem(
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
    own_bias = torch.randn(columns).to(device, dtype) if bias else None
    target = torch.randint(columns, (tokens,))
    target[::2] = (hidden.double() @ weight.double().t())[::2].argmax(-1)
    return hidden.to(device), Head(weight.to(device), own_bias, PLAIN), target.to(device)


def logits_of(hidden: Tensor, head: Head, wide: torch.dtype) -> Tensor:
    """Return raw logits computed in ``wide``."""
    logits = hidden.to(wide) @ head.weight.to(wide).t()
    if head.bias is not None:
        logits = logits + head.bias.to(wide)
    return logits


def scores_of(logits: Tensor, transform: Transform) -> Tensor:
    """Return the scores of raw logits in their dtype."""
    return oracle.transformed(
        logits, transform.logit_scale, transform.softcap, transform.temperature
    )


def statistics(logits: Tensor, target: Tensor, transform: Transform) -> RowStats:
    """Return the statistics of raw logits in their dtype, differentiable."""
    found = oracle.statistics(scores_of(logits, transform), target)
    names = (*STATS, *EXTRAS)
    is_top1 = logits.argmax(-1) == target
    return RowStats(**{name: found.get(name, is_top1) for name in names})


def dlogits(
    logits: Tensor,
    target: Tensor,
    transform: Transform,
    grad_stats: StatsGrad,
    wide: torch.dtype = torch.float64,
) -> Tensor:
    """Return the gradient of the logits by autograd, in ``wide``."""
    logits = logits.detach().to(wide).requires_grad_()
    stats = statistics(logits, target, transform)
    loss = sum(
        (values * gradient.to(wide)).sum()
        for values, gradient in zip(stats[:2], grad_stats[:2], strict=True)
        if gradient is not None
    )
    return torch.autograd.grad(loss, logits)[0]


def same(a: RowStats, b: RowStats) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None)
