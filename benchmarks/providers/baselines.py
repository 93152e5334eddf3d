"""Shared by the baselines: what they need, and how their losses are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmarks.problem import Problem, Result
from benchmarks.providers.eager import Scores, run_with
from benchmarks.shapes import Case
from grpo_kernels import LossConfig
from grpo_kernels.losses.surrogates import Clip

# their loss types by our aggregations: gspo is their "grpo" over ratios of sequences
_LOSS_TYPES = {"window_token_mean": "dapo", "sequence_mean": "grpo"}

# (problem, "mean" or "none") to the () mean or the (T,) values of the negative log-likelihood
CrossEntropy = Callable[[Problem, str], Tensor]


def loss_arguments(config: LossConfig) -> dict[str, Any]:
    """Return the arguments that TRL's and Liger's GRPO losses share."""
    named, clip = config.loss, config.surrogate
    assert isinstance(clip, Clip)
    return dict(
        loss_type=_LOSS_TYPES[named.aggregation],
        importance_sampling_level=config.importance_sampling_level
        or named.importance_sampling_level,
        beta=config.beta,
        epsilon_low=clip.epsilon,
        epsilon_high=clip.epsilon if clip.epsilon_high is None else clip.epsilon_high,
        delta=clip.delta,
        use_bias_correction_kl=config.use_bias_correction_kl,
        temperature=config.temperature,
    )


def run_cross_entropy(
    call: CrossEntropy, loss: Callable[[Problem], Tensor] | None = None
) -> Callable[[Problem], Result]:
    """Run any work on top of a linear cross entropy that is differentiable for each token."""

    def head(problem: Problem, with_entropy: bool) -> Scores:
        return -call(problem, "none").float().view_as(problem.target), None

    return run_with(head, mean=lambda problem: call(problem, "mean"), loss=loss)


def no_entropy(case: Case) -> str | None:
    """Serve as the ``unable`` of cross entropies, which give no entropy."""
    return "no entropy" if case.work.entropy else None


def no_softcap(case: Case) -> str | None:
    """Serve as the ``unable`` of those that leave logits as they are."""
    return "no softcap" if case.model.softcap is not None else None
