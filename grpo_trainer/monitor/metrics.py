"""Metrics between two log calls: tensors on the device, read by one reduction and one transfer."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.monitor.phases import Phases

# what the trainer logs itself, transformers' part included
_OWN = {
    "aux_loss",
    "cispo_clip_ratio",
    "entropy",
    "entropy_coef",
    "entropy_top",
    "epoch",
    "frac_reward_zero_std",
    "frac_rows_skipped",
    "grad_norm",
    "kl",
    "learning_rate",
    "loss",
    "num_input_tokens_seen",
    "num_tokens",
    "perplexity",
    "policy_loss",
    "reward",
    "reward_std",
    "step",
    "step_time",
    "total_flos",
}
_OWN_PREFIXES = (
    "backward_",
    "clip_ratio/",
    "completions/",
    "dynamic_sampling/",
    "entropy/",
    "eval_",
    "profiling/",
    "ratio/",
    "rewards/",
    "sampling/",
    "tools/",
    "train_",
    "vespo/",
)

_ZERO_OF_NONE = "_terminated_length"

_FOLD_AFTER = 64  # merge pending micro-batches, so that long windows hold few tensors


def is_own_metric(name: str) -> bool:
    """Return whether the trainer gives this name, or one that begins so, to a metric of its own."""
    return name in _OWN or name.startswith(_OWN_PREFIXES)


class MetricLog:
    """Collects :class:`grpo_kernels.losses.Metrics` until they are logged."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._pending: list[Metrics] = []
        self.phases = Phases(accelerator.device)

    def add(self, metrics: Metrics) -> None:
        self._pending.append(metrics)
        if len(self._pending) >= _FOLD_AFTER:
            self._pending = [Metrics.merge(self._pending)]

    def state(self) -> list[dict[str, tuple[str, Tensor, Tensor]]]:
        """Return what is not logged yet, as it is: merging it would change how it is rounded."""
        return [
            {name: (stat.kind, stat.total, stat.count) for name, stat in metrics.stats.items()}
            for metrics in self._pending
        ]

    def restore(self, state: list[dict[str, tuple[str, Tensor, Tensor]]]) -> None:
        self._pending = [
            Metrics({name: Stat(*fields) for name, fields in stats.items()}) for stats in state
        ]

    def drain(self) -> dict[str, float]:
        """Return values over all micro-batches and processes, without names that have no sample.

        The lengths of completions that ended are 0 where none did, as in TRL.
        """
        pending = Metrics.merge([*self._pending, self.phases.drain()])
        merged = pending
        if self._accelerator.num_processes > 1:
            merged = pending.gathered(self._accelerator.gather)
        self._pending = []
        if not merged:
            return {}
        values = torch.stack([merged[name].double() for name in merged]).tolist()
        read = dict(zip(merged, values, strict=True))
        return {
            name: value if value == value else 0.0
            for name, value in read.items()
            if value == value or name.endswith(_ZERO_OF_NONE)
        }


def value_metric(name: str, value: float | Tensor, device: torch.device) -> Metrics:
    """Return one sample of a number, averaged over the window."""
    total = torch.as_tensor(value, dtype=torch.float64, device=device).detach()
    return Metrics({name: Stat("mean", total, torch.ones_like(total))})


def step_metric(name: str, part: Tensor, last: bool) -> Metrics:
    """Return a micro-batch's part of an optimizer step's sum, averaged over the window's steps."""
    total = part.detach().double()
    count = torch.ones_like(total) if last else torch.zeros_like(total)
    return Metrics({name: Stat("mean", total, count)})
