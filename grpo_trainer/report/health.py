"""Known signs that a run is unwell, found in its log and said in plain words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from grpo_trainer.report.record import History
from grpo_trainer.report.series import Curve, Curves, curves_of

_FEWEST_POINTS = 5  # a trend needs so many
_LEARNED = (
    0.95  # share of the way from the first reward to the best one, after which all is learned
)


class Finding(NamedTuple):
    """A sign, what it means and what helps."""

    title: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What is wrong where a metric's mean over the last fifth of the run is too large or too small.

    Args:
        title: what it is a sign of.
        text: what it means and what helps, with places for ``metric`` and its means, ``first`` and
            ``last``.
        metrics: of which one is enough.
        above: the largest value that is fine.
        growth: how many times the mean of the first fifth is fine.
        fall: what share of the mean of the first fifth is too little.
        ends_well: it is no sign of anything where all is learned.
    """

    title: str
    text: str
    metrics: tuple[str, ...]
    above: float = math.inf
    growth: float = 0.0
    fall: float = 0.0
    ends_well: bool = False

    def find(self, curves: Curves) -> Finding | None:
        """Return what is wrong in ``curves``, if it is."""
        for metric in self.metrics:
            values = curves[metric].finite if metric in curves else []
            if len(values) < _FEWEST_POINTS:
                continue
            first, last = _ends(values)
            if last > max(self.above, self.growth * first) or last < self.fall * first:
                return Finding(self.title, self.text.format(metric=metric, first=first, last=last))
        return None


# after the numbers that are not finite, the gravest first
_SIGNS = (
    Sign(
        title="Entropy has collapsed",
        metrics=("entropy",),
        fall=0.2,
        ends_well=True,
        text="It fell from {first:.3g} to {last:.3g} nats per token: the policy hardly tries "
        "anything else any more. Fine if the reward is as high as it can get. If not, raise "
        "entropy_coef or epsilon_high, lower the learning rate, or use_adaptive_entropy.",
    ),
    Sign(
        title="Much is clipped",
        metrics=("clip_ratio/region_mean", "cispo_clip_ratio"),
        above=0.2,
        text="{last:.0%} of the tokens are outside of the clip range ({metric}) and give no "
        "gradient: the policy moves far within one generation batch. Lower the learning "
        "rate, num_iterations or steps_per_generation.",
    ),
    Sign(
        title="Most advantages are zero",
        metrics=("frac_reward_zero_std",),
        above=0.8,
        ends_well=True,
        text="In {last:.0%} of the groups all completions have the same reward, so nothing is "
        "learned from them. Fine if they are all right. If not, the prompts are too hard or too "
        "easy, or the reward is too coarse: dynamic_sampling replaces such groups, a larger "
        "num_generations makes them rarer.",
    ),
    Sign(
        title="Many completions are cut off",
        metrics=("completions/clipped_ratio",),
        above=0.3,
        text="{last:.0%} reach max_completion_length before they end, and are scored as they are. "
        "Raise it, leave them out with mask_truncated_completions, or reward shorter ones "
        "(get_soft_overlong_punishment).",
    ),
    Sign(
        title="Engine and policy drift apart",
        metrics=("sampling/mismatch_kl_k3",),
        above=1e-3,  # nats; below this it is rounding
        growth=3.0,
        text="The KL divergence between the engine that samples and the policy that is trained "
        "grew from {first:.2g} to {last:.2g} nats per token. Look for stale weights, another "
        "precision or other sampling settings in the engine; the importance sampling correction "
        "hides it only so far.",
    ),
)


def findings(history: History, best: float | None = None) -> list[Finding]:
    """Find the signs in the log of what is wrong.

    Args:
        history: what the trainer logged.
        best: the highest reward of any completion; None: not known.
    """
    curves = curves_of(history)
    signs = [sign for sign in _SIGNS if not (sign.ends_well and _all_learned(curves, best))]
    found = [_not_finite(curves), *(sign.find(curves) for sign in signs)]
    return [finding for finding in found if finding is not None]


def _all_learned(curves: Curves, best: float | None) -> bool:
    rewards = curves["reward"].finite if "reward" in curves else []
    if best is None or len(rewards) < _FEWEST_POINTS:
        return False
    first, last = _ends(rewards)
    return last - first >= _LEARNED * (best - first)


def _ends(values: list[float]) -> tuple[float, float]:
    """Return the means of the first and the last fifth."""
    part = len(values) // 5
    return sum(values[:part]) / part, sum(values[-part:]) / part


def _not_finite(curves: Curves) -> Finding | None:
    for name in ("loss", "grad_norm"):
        curve = curves.get(name, Curve([], []))
        if None in curve.values:
            step = curve.steps[curve.values.index(None)]
            return Finding(
                "Numbers are no longer finite",
                f"{name} is NaN or infinite at step {step}. A lower learning rate, max_grad_norm "
                "and a look at the rewards help; what comes after that step is worth nothing.",
            )
    return None
