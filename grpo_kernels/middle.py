"""The middle stage inside a schedule: torch ops, or one printed Triton kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from grpo_kernels.batch import TokenBatch
from grpo_kernels.logprob.rows import RowStats
from grpo_kernels.logprob.schedule import Middle
from grpo_kernels.losses import LossConfig
from grpo_kernels.losses.stage import (
    TokenInputs,
    segments_of,
    stage_gradients,
    token_inputs,
)
from grpo_kernels.losses.terms import Segments
from grpo_kernels.losses.weights import Weights


class MiddleChoice(NamedTuple):
    """How the middle stage runs, and why."""

    printed: bool
    reason: str


def choose_middle(backend: str, scope: str, batch: TokenBatch, config: LossConfig) -> MiddleChoice:
    """A printed kernel for Triton and token scope, if the loss can be traced; else torch ops."""
    if backend != "triton":
        return MiddleChoice(False, "middle stage: torch ops")
    if scope != "token":
        return MiddleChoice(False, f"middle stage: torch ops, the loss has {scope} scope")
    from grpo_kernels.pointwise import UntraceableError

    try:
        _printed_stage(config, _present(batch))
    except UntraceableError as error:
        return MiddleChoice(False, f"middle stage: torch ops, because {error}")
    return MiddleChoice(True, "middle stage: one Triton kernel, printed from the loss")


def make_middle(batch: TokenBatch, weights: Weights, config: LossConfig, printed: bool) -> Middle:
    """The callback that the schedule runs between statistics and logit gradients."""

    def middle(rows: slice, stats: RowStats) -> tuple[Tensor, Tensor | None]:
        part = batch.narrow(rows.start, rows.stop)
        part_weights = Weights(*(weight[rows] for weight in weights))
        x = token_inputs(stats.logp, stats.entropy, part, part_weights)
        if not printed:
            return stage_gradients(x, segments_of(part), config)
        present = _present(part)
        gradients = _printed_stage(config, present)(*(getattr(x, name) for name in present))
        return gradients[0], gradients[1] if len(gradients) > 1 else None

    return middle


def _present(batch: TokenBatch) -> tuple[str, ...]:
    """The fields of :class:`TokenInputs` that this batch fills."""
    optional = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    missing = {name for name in optional if getattr(batch, name) is None}
    return tuple(name for name in TokenInputs._fields if name not in missing)


@functools.lru_cache(maxsize=256)
def _printed_stage(config: LossConfig, present: tuple[str, ...]):
    """The kernel of ``stage_gradients`` for this loss: traced, derivative included, and printed."""
    from grpo_kernels.pointwise import PointwiseKernel

    def gradients(*vectors: Tensor) -> tuple[Tensor, ...]:
        fields: dict[str, Tensor | None] = dict.fromkeys(TokenInputs._fields)
        fields.update(zip(present, vectors, strict=True))
        results = stage_gradients(TokenInputs(**fields), _NO_SEGMENTS, config)  # type: ignore[arg-type]
        return tuple(result for result in results if result is not None)

    return PointwiseKernel.trace(gradients, len(present), present)


def _no_segments(values: Tensor) -> Tensor:
    raise AssertionError("a loss of token scope reduces nothing over sequences")


_NO_SEGMENTS = Segments(_no_segments, _no_segments, _no_segments)
