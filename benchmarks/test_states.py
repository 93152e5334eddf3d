"""Whole runs of the demo's task with weights and optimizer states in fewer bits.

A case is one way with one seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from benchmarks.conftest import Session, check_row
from benchmarks.providers.base import lacking
from benchmarks.real import RealCase, Setup, fill
from benchmarks.results import Row

_STEPS, _SEEDS = 60, (0, 1, 2)
LAST = 10  # steps at the end, for the mean reward
# the demo's settings, with a quarter of its completions
_TASK: dict[str, Any] = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "entropy_coef": 0.05,
    "loss_type": "dapo",
    "epsilon_high": 0.2,
    "per_device_train_batch_size": 128,
    "gradient_accumulation_steps": 1,
    "num_generations": 16,
    "max_completion_length": 4,
    "num_generations_eval": 4,
    "per_device_eval_batch_size": 512,
}
_BF16 = {"model_init_kwargs": {"dtype": "bfloat16"}}
_ROUNDED = {"optim_args": "bf16_stochastic_round=True"}


def _way(note: str, rounded: bool = False, **settings: Any) -> Setup:
    changes = _TASK | {"optim": "adamw_torch"} | settings
    return Setup(note=note, package="grpo_trainer", rounded=rounded, changes=changes)


STATES = {
    "fp32": _way("fp32 weights and states"),
    "fp32-8bit": _way("fp32 weights, 8-bit states of bitsandbytes", optim="adamw_8bit"),
    "bf16": _way("bf16 weights and states", **_BF16),
    "bf16-rounded": _way("bf16 weights and states, rounded stochastically", rounded=True, **_BF16),
    "bf16-rounded-8bit": _way(
        "bf16 weights, 8-bit states of torchao, rounded stochastically",
        optim="adamw_torch_8bit",
        **_BF16,
        **_ROUNDED,
    ),
    "bf16-rounded-4bit": _way(
        "bf16 weights, 4-bit states of torchao, rounded stochastically",
        optim="adamw_torch_4bit",
        **_BF16,
        **_ROUNDED,
    ),
    "fp32-adafactor": _way("fp32 weights, Adafactor", optim="adafactor"),
}
CASES = {
    "tiny": [RealCase(2, 0, name, tiny=True) for name in ("fp32", "bf16-rounded-8bit")],
    "cpu": [RealCase(_STEPS, seed, name, tiny=True) for name in STATES for seed in _SEEDS],
}


def notes(case: RealCase) -> dict[str, str]:
    return {case.setup: STATES[case.setup].note}


def about(case: RealCase, device: str) -> str:
    return f"{case.steps} steps of 128 completions of the demo's task"


def measure(case: RealCase, rows: Sequence[Row], session: Session) -> None:
    [row] = rows
    row.leave_out("absent", lacking("bitsandbytes", "torchao"))
    found = fill(row, STATES[case.setup], case, session.device, "rewards", "held_out")
    if row.runs:
        rewards = found["rewards"]
        row.cells = {
            "mean reward": f"{fmean(rewards):.3f}",
            "at the end": f"{fmean(rewards[-LAST:]):.3f}",
            "held out": f"{found['held_out'][-1]:.3f}",
        }


test_states = check_row
