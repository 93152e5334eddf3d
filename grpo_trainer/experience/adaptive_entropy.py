"""The entropy coefficient that follows the policy's entropy (Skywork-OR1, arXiv:2505.22312)."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.monitor import value_metric


class AdaptiveEntropy:
    """Raises the coefficient after a step at or below the target entropy, lowers it after others.

    The bonus applies while the last step's entropy is at or below the target; so not in the first
    step. The entropy is the mean over the tokens of the step that the policy loss is made of. All
    of it stays on the device: a step waits for nothing.
    """

    def __init__(self, args: GRPOConfig, accelerator: Accelerator) -> None:
        self._args = args
        self._accelerator = accelerator
        self._coef = self._number(args.entropy_coef)
        self._last = self._number(torch.inf)
        self._window = torch.zeros(2, dtype=torch.float64, device=accelerator.device)

    @property
    def scale(self) -> Tensor:
        """The coefficient that applies now, ()."""
        return torch.where(self._last <= self._args.entropy_target, self._coef, 0.0)

    def add(self, metrics: Metrics) -> None:
        """Note a micro-batch's entropy."""
        stat = metrics.stats.get("entropy_top") or metrics.stats["entropy"]
        self._window += torch.stack([stat.total.double(), stat.count.double()])

    def step(self) -> Metrics:
        """Move the coefficient, at the end of an optimizer step, and return it for the log."""
        total, count = self._accelerator.reduce(self._window, "sum")
        entropy = total / count.clamp(min=1)
        args = self._args
        low = entropy <= args.entropy_target
        delta = torch.where(low, args.entropy_coef_delta, -args.entropy_coef_delta)
        self._coef = (self._coef + delta).clamp(args.entropy_coef_min, args.entropy_coef_max)
        self._last = entropy
        self._window = torch.zeros_like(self._window)
        return value_metric("entropy_coef", self._coef, self._accelerator.device)

    def state(self) -> dict[str, float]:
        """Return what the next step depends on, between two steps."""
        return {"coef": self._coef.item(), "last": self._last.item()}

    def restore(self, state: dict[str, float]) -> None:
        self._coef, self._last = self._number(state["coef"]), self._number(state["last"])

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
