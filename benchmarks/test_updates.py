"""The share of a small step that survives in weights and optimizer states in fewer bits.

A case is one way with one seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from benchmarks.conftest import Session, check_row
from benchmarks.measure import attempt
from benchmarks.providers.base import lacking
from benchmarks.real import RealCase, Setup, rounded_adamw
from benchmarks.results import Row
from benchmarks.test_states import STATES, notes  # noqa: F401 (of a case)

_SMALL = 1e-6  # the trainer's default learning rate
_SIZE = 1024  # of a square matrix
_TYPICAL = 0.02  # standard deviation of pretrained weights
_SEEDS = (0, 1, 2)
CASES = {
    suite: [RealCase(1, seed, name, tiny=True) for name in STATES for seed in seeds]
    for suite, seeds in {"tiny": _SEEDS[:1], "cpu": _SEEDS}.items()
}


def about(case: RealCase, device: str) -> str:
    return f"one step of a matrix of {_SIZE} x {_SIZE}, learning rate {_SMALL:g}"


def measure(case: RealCase, rows: Sequence[Row], session: Session) -> None:
    [row] = rows
    row.info["work"] = f"seed {case.seed}"
    row.leave_out("absent", lacking("bitsandbytes", "torchao"))
    if row.runs:
        with attempt(row), torch.compiler.set_stance("force_eager"):
            row.info["kept"] = kept(STATES[case.setup], case.seed)
            row.cells = {"kept": f"{row.info['kept']:.2f}"}


def kept(way: Setup, seed: int) -> float:
    """Return the share of a step that survives, relative to the same optimizer in fp32."""
    generator = torch.Generator().manual_seed(seed)
    start = _TYPICAL * torch.randn(_SIZE, _SIZE, generator=generator).bfloat16()
    gradient = torch.randn(start.shape, generator=generator)
    torch.manual_seed(seed)  # of the rounding
    exact = _moved(way, torch.float32, start, gradient)
    dtype = torch.bfloat16 if "model_init_kwargs" in way.changes else torch.float32
    moved = _moved(way, dtype, start, gradient)
    return float((moved * exact).sum() / (exact * exact).sum())


def _moved(way: Setup, dtype: torch.dtype, start: Tensor, gradient: Tensor) -> Tensor:
    """Return the change of the weights in the first step."""
    args = TrainingArguments(
        optim=way.changes["optim"],
        optim_args=way.changes.get("optim_args"),
        learning_rate=_SMALL,
        use_cpu=True,
    )
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    if way.rounded:
        kind, settings = rounded_adamw()
    weight = nn.Parameter(start.to(dtype, copy=True))
    weight.grad = gradient.to(dtype)
    kind([weight], **{"lr": _SMALL} | settings).step()
    return weight.detach().double() - start.double()


test_updates = check_row
