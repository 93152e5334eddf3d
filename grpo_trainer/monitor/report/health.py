"""Known signs that a run is unwell, found in its log and said in plain words."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from grpo_trainer.monitor.report.record import History
from grpo_trainer.monitor.report.series import Curves

# what counts as unwell, over the last fifth of the run
COLLAPSED_ENTROPY = 0.2  # of what it was in the first fifth
MUCH_CLIPPED = 0.2  # of the tokens
FEW_GROUPS_LEARN = 0.8  # of the groups have equal rewards
MANY_TRUNCATED = 0.3  # of the completions
GROWING_MISMATCH = 3.0  # times what it was in the first fifth
SMALL_MISMATCH = 1e-3  # nats; below this it is rounding

_FEWEST_POINTS = 5  # a trend needs so many


class Finding(NamedTuple):
    """A sign, what it means and what helps."""

    title: str
    text: str


def findings(history: History) -> list[Finding]:
    """Find the signs in the log of what is wrong, the gravest first."""
    curves = Curves(history)
    return [found for check in _CHECKS if (found := check(curves)) is not None]


def _not_finite(curves: Curves) -> Finding | None:
    for name in ("loss", "grad_norm"):
        if name in curves and None in curves[name].values:
            step = curves[name].steps[curves[name].values.index(None)]
            return Finding(
                "Numbers are no longer finite",
                f"{name} is NaN or infinite at step {step}. A lower learning rate, max_grad_norm "
                "and a look at the rewards help; what comes after that step is worth nothing.",
            )
    return None


def _entropy_collapse(curves: Curves) -> Finding | None:
    first, last = _ends(curves, "entropy")
    if first is None or last is None or last >= COLLAPSED_ENTROPY * first:
        return None
    return Finding(
        "Entropy has collapsed",
        f"It fell from {first:.3g} to {last:.3g} nats per token: the policy hardly tries "
        "anything else any more. Fine if the reward is as high as it can get. If not, raise "
        "entropy_coef or epsilon_high, lower the learning rate, or use_adaptive_entropy.",
    )


def _clipping(curves: Curves) -> Finding | None:
    for name in ("clip_ratio/region_mean", "cispo_clip_ratio"):
        _, last = _ends(curves, name)
        if last is not None and last > MUCH_CLIPPED:
            return Finding(
                "Much is clipped",
                f"{last:.0%} of the tokens are outside of the clip range ({name}) and give no "
                "gradient: the policy moves far within one generation batch. Lower the learning "
                "rate, num_iterations or steps_per_generation.",
            )
    return None


def _no_signal(curves: Curves) -> Finding | None:
    _, last = _ends(curves, "frac_reward_zero_std")
    if last is None or last <= FEW_GROUPS_LEARN:
        return None
    return Finding(
        "Most advantages are zero",
        f"In {last:.0%} of the groups all completions have the same reward, so nothing is learned "
        "from them. Fine if they are all right. If not, the prompts are too hard or too easy, or "
        "the reward is too coarse: dynamic_sampling replaces such groups, a larger "
        "num_generations makes them rarer.",
    )


def _truncation(curves: Curves) -> Finding | None:
    _, last = _ends(curves, "completions/clipped_ratio")
    if last is None or last <= MANY_TRUNCATED:
        return None
    return Finding(
        "Many completions are cut off",
        f"{last:.0%} reach max_completion_length before they end, and are scored as they are. "
        "Raise it, leave them out with mask_truncated_completions, or reward shorter ones "
        "(get_soft_overlong_punishment).",
    )


def _mismatch(curves: Curves) -> Finding | None:
    first, last = _ends(curves, "sampling/mismatch_kl_k3")
    if first is None or last is None or last <= max(GROWING_MISMATCH * first, SMALL_MISMATCH):
        return None
    return Finding(
        "Engine and policy drift apart",
        f"The KL divergence between the engine that samples and the policy that is trained grew "
        f"from {first:.2g} to {last:.2g} nats per token. Look for stale weights, another "
        "precision or other sampling settings in the engine; the importance sampling correction "
        "hides it only so far.",
    )


_CHECKS: tuple[Callable[[Curves], Finding | None], ...] = (
    _not_finite,
    _entropy_collapse,
    _clipping,
    _no_signal,
    _truncation,
    _mismatch,
)


def _ends(curves: Curves, name: str) -> tuple[float | None, float | None]:
    """Return the means of the first and the last fifth; None where the curve is too short."""
    values = curves[name].finite if name in curves else []
    if len(values) < _FEWEST_POINTS:
        return None, None
    part = max(len(values) // 5, 1)
    return sum(values[:part]) / part, sum(values[-part:]) / part
