"""Which curves are drawn together, and what they tell."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from grpo_trainer.monitor import PHASES
from grpo_trainer.report.series import Curves, evaluations


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves over one axis. Those that a run has not logged are left out.

    Args:
        title: what they show.
        lines: metric -> how it is called in the legend.
        note: how to read it, one sentence.
        band: metrics below and above the first line.
        spread: metric that is a distance from the first line, both ways.
        total: metric that the lines add up to: they are stacked, or it stands for them.
        log: logarithmic axis.
        held_out: evaluations are drawn as dots.
        exact: the values have no noise to smooth.
    """

    title: str
    lines: dict[str, str]
    note: str = ""
    band: tuple[str, str] | None = None
    spread: str | None = None
    total: str | None = None
    log: bool = False
    held_out: bool = False
    exact: bool = False


_LEARNING = (
    Chart(
        title="Reward",
        lines={"reward": "mean"},
        spread="reward_std",
        held_out=True,
        note="Mean of all completions, with its standard deviation; dots are evaluations.",
    ),
    Chart(
        title="Groups without signal",
        lines={"frac_reward_zero_std": "share"},
        held_out=True,
        note="Share of groups whose rewards are all alike: their advantages are zero.",
    ),
    Chart(
        title="Entropy",
        lines={"entropy": "mean"},
        band=("entropy/sequence_min", "entropy/sequence_max"),
        held_out=True,
        note="Nats per token; the band reaches from the surest completion to the least sure one.",
    ),
    Chart(
        title="KL to the reference",
        lines={"kl": "mean"},
        held_out=True,
        note="Nats per token that the policy has moved away from the reference.",
    ),
    Chart(
        title="Clipped tokens",
        lines={
            "clip_ratio/region_mean": "all",
            "clip_ratio/low_mean": "below the range",
            "clip_ratio/high_mean": "above the range",
            "cispo_clip_ratio": "weight cut",
        },
        note="Share of tokens whose ratio left the clip range, so that they give no gradient.",
    ),
    Chart(
        title="Ratio to the old policy",
        lines={"ratio/ess": "effective share of tokens"},
        band=("ratio/min", "ratio/max"),
        note="Band: smallest to largest ratio. Line: effective sample size over the tokens.",
    ),
    Chart(
        title="Loss",
        lines={"loss": "loss", "policy_loss": "without the entropy bonus"},
        note="Hovers around zero by construction: the reward says whether the policy learns.",
    ),
    Chart(title="Gradient norm", lines={"grad_norm": "before clipping"}),
    Chart(title="Learning rate", lines={"learning_rate": "learning rate"}, exact=True),
    Chart(title="Entropy coefficient", lines={"entropy_coef": "coefficient"}, exact=True),
    Chart(title="Load-balancing loss of the routers", lines={"aux_loss": "loss"}),
)

_COMPLETIONS = (
    Chart(
        title="Completion length",
        lines={
            "completions/mean_length": "mean",
            "completions/mean_terminated_length": "mean of those that ended",
        },
        band=("completions/min_length", "completions/max_length"),
        held_out=True,
        note="Tokens; the band reaches from the shortest to the longest.",
    ),
    Chart(
        title="Cut off by the length limit",
        lines={"completions/clipped_ratio": "share"},
        held_out=True,
        note="Share of completions without an end-of-sequence token.",
    ),
    Chart(
        title="Tool calls",
        lines={
            "tools/call_frequency": "calls per completion",
            "tools/failure_frequency": "share that failed",
        },
    ),
    Chart(
        title="Dynamic sampling",
        lines={
            "dynamic_sampling/resampling_rounds": "rounds",
            "dynamic_sampling/discarded_groups": "groups discarded",
            "dynamic_sampling/unfilled_groups": "groups without signal kept",
        },
    ),
)

_LOGP = "sampling/sampling_logp_difference"
_WEIGHT = "sampling/importance_sampling_ratio"
_MISMATCH = (
    Chart(
        title="Log-probability difference",
        lines={f"{_LOGP}/mean": "mean", f"{_LOGP}/max": "largest"},
        note="Between the engine that samples and the policy, per token; rounding if all is well.",
        log=True,
    ),
    Chart(
        title="Mismatch KL",
        lines={"sampling/mismatch_kl_k3": "k3", "sampling/mismatch_kl_k1": "k1"},
        note="Divergence of engine and policy, nats per token, by two estimators.",
    ),
    Chart(
        title="Importance sampling weight",
        lines={f"{_WEIGHT}/mean": "mean"},
        band=(f"{_WEIGHT}/min", f"{_WEIGHT}/max"),
        note="What the loss multiplies tokens or sequences with to correct for the mismatch.",
    ),
)

_SPEED = (
    Chart(
        title="Tokens per second",
        lines={"tokens_per_second": "prompt and completion tokens"},
        note="Over the seconds of the training steps.",
    ),
    Chart(
        title="Seconds per step",
        lines={f"profiling/{phase}": phase for phase in PHASES},
        note="sync: weights on their way to the engine; old, ref: their log-probabilities.",
        total="step_time",
    ),
)

# metrics that say nothing as a curve, or are drawn elsewhere under another name
_NOT_DRAWN = frozenset({"num_tokens", "step_time", "total_flos", "train_loss", "reward_std"})


def sections(curves: Curves, apart: bool = False) -> dict[str, list[Chart]]:
    """Return all charts that ``curves`` has something for, by the titles of their sections.

    What nobody knows comes last. With ``apart`` each reward function has a chart of its own.
    """
    known = {
        "Learning": [_LEARNING[0], *_by_function(curves, apart), *_LEARNING[1:]],
        "Completions": _COMPLETIONS,
        "Rollout engine against policy": _MISMATCH,
        "Speed": _SPEED,
    }
    found = {
        title: [chart for chart in charts if any(name in curves for name in chart.lines)]
        for title, charts in known.items()
    }
    drawn = {name for charts in found.values() for chart in charts for name in metrics_of(chart)}
    found["Other metrics"] = _others(curves, drawn)
    return {title: charts for title, charts in found.items() if charts}


def metrics_of(chart: Chart) -> list[str]:
    """Return every metric that it draws."""
    extra = [chart.spread] if chart.spread else []
    return [*chart.lines, *(chart.band or ()), *extra]


def constants(chart: Chart, runs: Collection[Curves]) -> dict[str, float] | None:
    """Return the value of each line where no run ever moves any of them, else None.

    A chart with evaluations is never flat, nor is a single point.
    """
    if chart.held_out and any(evaluations(curves) for curves in runs):
        return None
    found: dict[str, float] = {}
    for name in metrics_of(chart):
        drawn = [curves[name] for curves in runs if name in curves]
        values = {value for curve in drawn for value in curve.finite}
        gaps = any(None in curve.values or len(curve.values) == 1 for curve in drawn)
        if len(values) > 1 or gaps:
            return None
        if name in chart.lines and values:
            found[chart.lines[name]] = values.pop()
    return found


def _by_function(curves: Curves, apart: bool) -> list[Chart]:
    """Return the rewards of each function, where there are several."""
    names = [name for name in curves if name.startswith("rewards/") and name.endswith("/mean")]
    if len(names) < 2:
        return []
    lines = {name: name.removeprefix("rewards/").removesuffix("/mean") for name in names}
    if apart:
        return [Chart(title=label, lines={name: label}) for name, label in lines.items()]
    return [Chart(title="Reward by function", lines=lines, note="Means, before their weights.")]


def _others(curves: Curves, drawn: set[str]) -> list[Chart]:
    known = ("eval_", "rewards/", "clip_ratio/", "completions/")
    names = [name for name in curves if name not in drawn | _NOT_DRAWN]
    names = [name for name in names if not name.startswith(known)]
    return [Chart(title=name, lines={name: name}) for name in sorted(names)]
