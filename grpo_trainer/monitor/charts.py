"""The table of metrics: how each is called, which are drawn together, when they are a bad sign."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from grpo_trainer.monitor.metrics import PHASES


@dataclass(frozen=True, kw_only=True)
class Sign:
    """What is wrong where a metric's mean over the last fifth of a run is too large or too small.

    Args:
        title: what it is a sign of.
        text: what it means and what helps, with places for ``metric`` and its means, ``first`` and
            ``last``.
        above: the largest value that is fine.
        growth: how many times the mean of the first fifth is fine.
        fall: what share of the mean of the first fifth is too little.
        ends_well: it is no sign of anything where all is learned.
    """

    title: str
    text: str
    above: float = math.inf
    growth: float = 0.0
    fall: float = 0.0
    ends_well: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Metrics over one axis. Those that a run has not logged are left out.

    Args:
        title: what they show.
        lines: metric -> how it is called in the legend.
        note: how to read it, one sentence.
        label: how the first of the lines that a run has is called in its view; empty: not there.
        tiles: metric -> how it is called at the head of a report.
        band: metrics below and above the first line.
        spread: metric that is a distance from the first line, both ways.
        total: metric that the lines add up to: they are stacked, or it stands for them.
        log: logarithmic axis.
        held_out: evaluations are drawn as dots.
        exact: the values have no noise to smooth.
        sign: of ill health, in the first of the lines that a run has.
    """

    title: str
    lines: dict[str, str]
    note: str = ""
    label: str = ""
    tiles: dict[str, str] = field(default_factory=dict)
    band: tuple[str, ...] = ()
    spread: str | None = None
    total: str | None = None
    log: bool = False
    held_out: bool = False
    exact: bool = False
    sign: Sign | None = None

    def metrics(self) -> list[str]:
        """Return every metric that it draws."""
        return [*self.lines, *self.band, *([self.spread] if self.spread else [])]

    def first(self, logged: Container[str]) -> str | None:
        """Return the first of the lines that is ``logged``."""
        return next((name for name in self.lines if name in logged), None)


_LOGP = "sampling/sampling_logp_difference"
_WEIGHT = "sampling/importance_sampling_ratio"

# by the titles of their sections
CHARTS = {
    "Learning": (
        Chart(
            title="Reward",
            lines={"reward": "mean"},
            label="reward",
            tiles={"reward": "reward", "eval_reward": "reward, held out"},
            spread="reward_std",
            held_out=True,
            note="Mean of all completions, with its standard deviation; dots are evaluations.",
        ),
        Chart(
            title="Groups without signal",
            lines={"frac_reward_zero_std": "share"},
            held_out=True,
            note="Share of groups whose rewards are all alike: their advantages are zero.",
            sign=Sign(
                title="Most advantages are zero",
                above=0.8,
                ends_well=True,
                text="In {last:.0%} of the groups all completions have the same reward, so nothing "
                "is learned from them. Fine if they are all right. If not, the prompts are too "
                "hard or too easy, or the reward is too coarse: dynamic_sampling replaces such "
                "groups, a larger num_generations makes them rarer.",
            ),
        ),
        Chart(
            title="KL to the reference",
            lines={"kl": "mean"},
            label="kl",
            tiles={"kl": "KL"},
            held_out=True,
            note="Nats per token that the policy has moved away from the reference.",
        ),
        Chart(
            title="Entropy",
            lines={"entropy": "mean"},
            label="entropy",
            tiles={"entropy": "entropy"},
            band=("entropy/sequence_min", "entropy/sequence_max"),
            held_out=True,
            note="Nats per token; the band reaches from the surest completion to the least sure "
            "one.",
            sign=Sign(
                title="Entropy has collapsed",
                fall=0.2,
                ends_well=True,
                text="It fell from {first:.3g} to {last:.3g} nats per token: the policy hardly "
                "tries anything else any more. Fine if the reward is as high as it can get. If "
                "not, raise entropy_coef or epsilon_high, lower the learning rate, or "
                "use_adaptive_entropy.",
            ),
        ),
        Chart(
            title="Clipped tokens",
            lines={
                "clip_ratio/region_mean": "all",
                "clip_ratio/low_mean": "below the range",
                "clip_ratio/high_mean": "above the range",
                "cispo_clip_ratio": "weight cut",
            },
            label="clipped",
            note="Share of tokens whose ratio left the clip range, so that they give no gradient.",
            sign=Sign(
                title="Much is clipped",
                above=0.2,
                text="{last:.0%} of the tokens are outside of the clip range ({metric}) and give "
                "no gradient: the policy moves far within one generation batch. Lower the "
                "learning rate, num_iterations or steps_per_generation.",
            ),
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
            label="loss",
            note="Hovers around zero by construction: the reward says whether the policy learns.",
        ),
        Chart(title="Gradient norm", lines={"grad_norm": "before clipping"}, label="gradient"),
        Chart(title="Learning rate", lines={"learning_rate": "learning rate"}, exact=True),
        Chart(title="Entropy coefficient", lines={"entropy_coef": "coefficient"}, exact=True),
        Chart(title="Load-balancing loss of the routers", lines={"aux_loss": "loss"}),
    ),
    "Completions": (
        Chart(
            title="Completion length",
            lines={
                "completions/mean_length": "mean",
                "completions/mean_terminated_length": "mean of those that ended",
            },
            label="length",
            tiles={"completions/mean_length": "length"},
            band=("completions/min_length", "completions/max_length"),
            held_out=True,
            note="Tokens; the band reaches from the shortest to the longest.",
        ),
        Chart(
            title="Cut off by the length limit",
            lines={"completions/clipped_ratio": "share"},
            label="cut off",
            held_out=True,
            note="Share of completions without an end-of-sequence token.",
            sign=Sign(
                title="Many completions are cut off",
                above=0.3,
                text="{last:.0%} reach max_completion_length before they end, and are scored as "
                "they are. Raise it, leave them out with mask_truncated_completions, or reward "
                "shorter ones (get_soft_overlong_punishment).",
            ),
        ),
        Chart(
            title="Tool calls",
            lines={
                "tools/call_frequency": "calls per completion",
                "tools/failure_frequency": "share that failed",
            },
            label="tool calls",
        ),
        Chart(
            title="Dynamic sampling",
            lines={
                "dynamic_sampling/resampling_rounds": "rounds",
                "dynamic_sampling/discarded_groups": "groups discarded",
                "dynamic_sampling/unfilled_groups": "groups without signal kept",
            },
        ),
    ),
    "Rollout engine against policy": (
        Chart(
            title="Log-probability difference",
            lines={f"{_LOGP}/mean": "mean", f"{_LOGP}/max": "largest"},
            note="Between the engine that samples and the policy, per token; rounding if all is "
            "well.",
            log=True,
        ),
        Chart(
            title="Mismatch KL",
            lines={"sampling/mismatch_kl_k3": "k3", "sampling/mismatch_kl_k1": "k1"},
            note="Divergence of engine and policy, nats per token, by two estimators.",
            sign=Sign(
                title="Engine and policy drift apart",
                above=1e-3,  # nats; below this it is rounding
                growth=3.0,
                text="The KL divergence between the engine that samples and the policy that is "
                "trained grew from {first:.2g} to {last:.2g} nats per token. Look for stale "
                "weights, another precision or other sampling settings in the engine; the "
                "importance sampling correction hides it only so far.",
            ),
        ),
        Chart(
            title="Importance sampling weight",
            lines={f"{_WEIGHT}/mean": "mean"},
            band=(f"{_WEIGHT}/min", f"{_WEIGHT}/max"),
            note="What the loss multiplies tokens or sequences with to correct for the mismatch.",
        ),
    ),
    "Speed": (
        Chart(
            title="Tokens per second",
            lines={"tokens_per_second": "prompt and completion tokens"},
            tiles={"tokens_per_second": "tokens/s"},
            note="Over the seconds of the training steps.",
        ),
        Chart(
            title="Seconds per step",
            lines={f"profiling/{phase}": phase for phase in PHASES},
            tiles={"step_time": "seconds per step"},
            note="sync: weights on their way to the engine; old, ref: their log-probabilities.",
            total="step_time",
        ),
    ),
}
EVERY_CHART = [chart for charts in CHARTS.values() for chart in charts]

# what the trainer logs beside the metrics of charts, transformers' part included
_NOT_DRAWN = (
    "entropy_top", "epoch", "frac_rows_skipped", "num_input_tokens_seen", "num_tokens",
    "perplexity", "step", "step_time", "total_flos",
)  # fmt: skip
# of whole families, which a run or a loss may add to
_FAMILIES = (
    "backward_", "clip_ratio/", "completions/", "dynamic_sampling/", "entropy/", "eval_",
    "profiling/", "ratio/", "rewards/", "sampling/", "tools/", "train_", "vespo/",
)  # fmt: skip
_OWN = {*_NOT_DRAWN, *(name for chart in EVERY_CHART for name in chart.metrics())} - {
    "tokens_per_second"  # the report computes it
}


def is_own_metric(name: str) -> bool:
    """Return whether the trainer gives this name, or one that begins so, to a metric of its own."""
    return name in _OWN or name.startswith(_FAMILIES)
