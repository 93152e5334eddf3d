"""Weights in the loss: advantages within groups, and the adaptive entropy coefficient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Advantages
from grpo_trainer.monitor import value_metric

STD_OFFSET = 1e-4  # keeps groups of nearly equal rewards from exploding
NO_SPREAD = 1e-8  # a smaller standard deviation is rounding
_LARGEST = 1e15  # of an advantage: gradients are squared in fp32

# (rewards, weights, group_size, ...) -> a number per completion, or one per token
AdvantageFunction: TypeAlias = Callable[..., Tensor | Sequence[Any]]
# more arguments that such a function may have, lists over the completions of all processes, and
# the sample's field for each
COMPLETION_ARGUMENTS = {
    "prompts": "prompt",
    "completions": "completion",
    "completion_ids": "completion_ids",
}


def compute_advantages(
    rewards: Tensor,  # (N, F)
    weights: Tensor,  # (F,)
    group_size: int,
    scale: str = "group",
    aggregation: str = "sum_then_normalize",
) -> Advantages:
    """Compare each completion with the others of its prompt.

    Args:
        rewards: (N, F) one column per reward function; NaN: not applicable. Groups are
            ``group_size`` consecutive rows.
        weights: (F,) weight of each reward function.
        group_size: completions per prompt; N is a multiple of it.
        scale: ``group`` divides by the group's standard deviation (GRPO, arXiv:2402.03300),
            ``batch`` by the deviation of all N, ``none`` does not divide (Dr. GRPO,
            arXiv:2503.20783).
        aggregation: ``sum_then_normalize``, or ``normalize_then_sum``, which normalizes each
            reward in its group, then the weighted sum over all N (GDPO, arXiv:2601.05242), and
            does not use ``scale``.

    Raises:
        ValueError: an advantage is too large for the loss.
    """
    rewards = rewards.double()
    total = weighted_sum(rewards, weights)
    if aggregation == "normalize_then_sum":
        scale = "batch"
        grouped = rewards.reshape(-1, group_size, rewards.shape[1])
        each = (grouped - grouped.nanmean(1, keepdim=True)) / (nan_std(grouped, 1) + STD_OFFSET)
        values = weighted_sum(each, weights)  # (groups, G)
        centred = values - values.nanmean()
    else:
        values = total.reshape(-1, group_size)
        centred = values - values.nanmean(1, keepdim=True)
    centred = centred.masked_fill(centred.abs() < NO_SPREAD, 0.0)
    std = nan_std(values.reshape(-1), 0) if scale == "batch" else nan_std(values, 1)
    zero_std = (std < NO_SPREAD).expand_as(centred).reshape(-1)
    # equal rewards stay equal when centered, while their standard deviation may be rounding
    signal = _differ(centred)
    if scale != "none":  # else the spread is only logged
        centred = centred / (std + STD_OFFSET)
    advantages = centred.reshape(-1)
    if scale == "none":
        _check_size("scale_rewards", advantages)
    return Advantages(torch.where(advantages.isfinite(), advantages, 0.0), total, zero_std, signal)


def advantages_by(
    function: AdvantageFunction,
    rewards: Tensor,  # (N, F)
    weights: Tensor,  # (F,)
    group_size: int,
    completions: dict[str, list[Any]],
    lengths: list[int],  # N, in tokens
) -> Advantages:
    """Call the user's advantage function, and check what it returns.

    ``completions`` are lists of N under the names in COMPLETION_ARGUMENTS that it accepts; the
    other arguments are as in :func:`compute_advantages`. It returns N numbers, or N lists with a
    number per completion token.

    Raises:
        ValueError: it returns something else.
    """
    answer = function(rewards=rewards, weights=weights, group_size=group_size, **completions)
    values = _values(answer, lengths).to(rewards.device)
    total = weighted_sum(rewards, weights)
    grouped = total.reshape(-1, group_size)
    of_group = values.reshape(len(grouped), group_size, -1)
    # a group with equal rewards may have nonzero advantages relative to a baseline
    equal = (nan_std(grouped, 1) < NO_SPREAD) & (of_group == 0).flatten(1).all(1, keepdim=True)
    zero_std = equal.expand_as(grouped).reshape(-1)
    signal = _differ(of_group).any(-1)
    return Advantages(values, total, zero_std, signal)


def check_advantages(function: AdvantageFunction, args: GRPOConfig) -> list[str]:
    """Return which of COMPLETION_ARGUMENTS a function accepts.

    Raises:
        ValueError: it cannot be called with the other arguments, or conflicts with a setting.
    """
    if not callable(function):
        raise ValueError(f"advantages: expected a function or an object to call, got {function!r}")
    signature = inspect.signature(function)
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    names = [name for name in COMPLETION_ARGUMENTS if takes_all or name in signature.parameters]
    try:
        signature.bind(rewards=None, weights=None, group_size=None, **dict.fromkeys(names))
    except TypeError as error:
        raise ValueError(
            "advantages: expected a function of rewards, weights and group_size, optionally also "
            f"of {', '.join(COMPLETION_ARGUMENTS)}, got {signature}: {error}"
        ) from error
    for name in ("scale_rewards", "multi_objective_aggregation"):
        default, value = getattr(GRPOConfig, name), getattr(args, name)
        if value != default:
            raise ValueError(
                f"{name}: expected {default!r} with advantages=, which replaces this comparison, "
                f"got {value!r}"
            )
    return names


def _values(answer: Any, lengths: list[int]) -> Tensor:
    """Return a function's answer, (N,) or (N, C) fp32."""
    rows = list(answer) if isinstance(answer, Tensor | list | tuple) else []
    if len(rows) != len(lengths):
        got = len(rows) if rows else type(answer).__name__
        raise ValueError(
            f"advantages: expected {len(lengths)} entries, one per completion, got {got}"
        )
    try:
        columns = [torch.as_tensor(row, dtype=torch.float32) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"advantages: expected numbers, or lists of them: {error}") from error
    dims = {column.dim() for column in columns}
    if dims not in ({0}, {1}):
        raise ValueError(
            "advantages: expected a number per completion, or a list per completion with a number "
            f"per token, got values of {sorted(dims)} dimensions"
        )
    if dims == {1}:
        for index, (column, length) in enumerate(zip(columns, lengths, strict=True)):
            if len(column) != length:
                raise ValueError(
                    f"advantages: expected one value per token of completion {index}, {length}, "
                    f"got {len(column)}"
                )
    values = torch.stack(columns) if dims == {0} else pad_sequence(columns, batch_first=True)
    if not values.isfinite().all():
        raise ValueError("advantages: expected finite numbers, got NaN or infinity")
    _check_size("advantages", values)
    return values


def _check_size(name: str, advantages: Tensor) -> None:
    largest = float(advantages.abs().nan_to_num(nan=0.0).max())
    if largest > _LARGEST:
        raise ValueError(
            f"{name}: expected advantages of at most {_LARGEST:g} in absolute value, since they "
            f"multiply the gradients, got {largest:.2g}; divide the rewards by a constant"
        )


def _differ(values: Tensor) -> Tensor:  # (groups, G, ...) -> (groups, ...)
    """Return whether a group's values differ by more than rounding; NaN: no value."""
    highest = values.masked_fill(values.isnan(), -torch.inf).amax(1)
    lowest = values.masked_fill(values.isnan(), torch.inf).amin(1)
    return highest - lowest >= NO_SPREAD


def nan_std(values: Tensor, dim: int) -> Tensor:
    """Return the Bessel-corrected standard deviation over ``dim`` (kept), in fp64; 0 for fewer than
    2 values."""
    values = values.double()
    count = (~values.isnan()).sum(dim, keepdim=True)
    deviations = (values - values.nanmean(dim, keepdim=True)).square().nansum(dim, keepdim=True)
    return (deviations / (count - 1).clamp(min=1)).sqrt()


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:  # (..., F) -> (...)
    """Return the sum of the rewards that apply, in fp64; NaN if none does."""
    total = (rewards.double() * weights).nansum(-1)
    return total.masked_fill(rewards.isnan().all(-1), torch.nan)


def rollout_metrics(
    names: list[str],
    rewards: Tensor,  # (N, F)
    compared: Advantages,
    lengths: Tensor,  # (N,) tokens of the policy
    truncated: Tensor,  # (N,) 1: ended without an end-of-sequence token
) -> Metrics:
    """Return a generation batch's metrics of rewards and completion lengths."""
    stats = {}
    for name, values in zip(names, rewards.unbind(1), strict=True):
        stats[f"rewards/{name}/mean"] = _mean(values)
        stats[f"rewards/{name}/std"] = _mean(nan_std(values, 0))
    stats["reward"] = _mean(compared.rewards)
    stats["reward_std"] = _mean(nan_std(compared.rewards, 0))
    stats["frac_reward_zero_std"] = _mean(compared.zero_std)
    stats["completions/clipped_ratio"] = _mean(truncated)
    for kind in ("mean", "min", "max"):
        stats[f"completions/{kind}_length"] = _stat(kind, lengths)
        stats[f"completions/{kind}_terminated_length"] = _stat(kind, lengths, truncated == 0)
    return Metrics(stats)


def _mean(values: Tensor) -> Stat:
    return _stat("mean", values, ~values.isnan())


def _stat(kind: str, values: Tensor, valid: Tensor | None = None) -> Stat:
    values = values.double()
    valid = torch.ones_like(values, dtype=torch.bool) if valid is None else valid
    neutral = {"mean": 0.0, "min": torch.inf, "max": -torch.inf}[kind]
    kept = torch.where(valid, values, neutral)
    total = {"mean": kept.sum(), "min": kept.amin(), "max": kept.amax()}[kind]
    return Stat(kind, total, valid.double().sum())


class AdaptiveEntropy:
    """The entropy coefficient that follows the policy's entropy (Skywork-OR1, arXiv:2505.22312).

    It is raised after a step at or below the target entropy, and lowered after others.

    The bonus applies while the last step's entropy is at or below the target, so not in the first
    step. The entropy is the mean over the tokens in the step's policy loss. Everything stays on the
    device, so steps do not synchronize.
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
        """Add a micro-batch's entropy."""
        stat = metrics.stats.get("entropy_top") or metrics.stats["entropy"]
        self._window += torch.stack([stat.total.double(), stat.count.double()])

    def step(self) -> Metrics:
        """Adjust the coefficient at the end of an optimizer step, and return it for the log."""
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
        """Return the state between two steps."""
        return {"coef": self._coef.item(), "last": self._last.item()}

    def restore(self, state: dict[str, float]) -> None:
        self._coef, self._last = self._number(state["coef"]), self._number(state["last"])

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self._accelerator.device)
