"""The middle stage inside a schedule: torch ops, or a device function inside the row kernel."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, Transform
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.engine.sweep import StatsGradients
from grpo_kernels.losses import LossConfig
from grpo_kernels.losses.stage import (
    StageOutput,
    TokenInputs,
    run_stage,
    segments_of,
    token_inputs,
)
from grpo_kernels.losses.terms import Segments
from grpo_kernels.losses.weights import Weights

if TYPE_CHECKING:
    from grpo_kernels.backends.triton.row_loss import RowFunction


class MiddleChoice(NamedTuple):
    """How the middle stage runs, and why."""

    kind: str  # "torch" | "row kernel" | "printed" | "triton segments"
    reason: str


def middle_stage(batch: TokenBatch, weights: Weights, config: LossConfig, kind: str) -> MiddleStage:
    """The stage of a ``kind`` that :func:`choose_middle` gave."""
    made = RowKernelStage if kind == "row kernel" else MiddleStage
    return made(batch, weights, config, kind)


class MiddleStage:
    """The callback between a chunk's statistics and its logit gradients."""

    def __init__(self, batch: TokenBatch, weights: Weights, config: LossConfig, kind: str) -> None:
        self.batch, self.weights, self.config, self.kind = batch, weights, config, kind
        self._contributions: list[Tensor] = []

    def __call__(self, rows: slice, stats: RowStats) -> StatsGradients:
        part, weights = self._part(rows)
        logp = stats.logp if stats.masked_logp is None else stats.masked_logp
        output = self._run(token_inputs(logp, stats.entropy, part, weights), part)
        self._contributions.append(output.contributions)
        if stats.masked_logp is None:
            return StatsGradients(output.dlogp, output.dentropy)
        return StatsGradients(None, output.dentropy, output.dlogp)

    def loss(self, dtype: torch.dtype) -> Tensor:
        """The () loss of all rows seen, summed in fp64 and in a fixed order."""
        if not self._contributions:
            return self.batch.advantages.new_zeros((), dtype=dtype)
        each = torch.cat(self._contributions)
        if self.kind == "torch":
            return each.double().sum().to(each.dtype)
        from grpo_kernels.backends.triton.segment_sum import weighted_sum

        return weighted_sum(each, torch.ones_like(each))

    def _part(self, rows: slice) -> tuple[TokenBatch, Weights]:
        weights = Weights(*(weight[rows] for weight in self.weights))
        return self.batch.narrow(rows.start, rows.stop), weights

    def _run(self, x: TokenInputs, part: TokenBatch) -> StageOutput:
        if self.kind == "torch":
            return run_stage(x, segments_of(part), self.config)
        if self.kind == "triton segments":
            return run_stage(x, _triton_segments(part), self.config)
        kernel = _printed_stage(self.config, _present(part))
        # what is absent is not read
        each, dlogp, *rest = kernel(*(x.logprobs if value is None else value for value in x))
        return StageOutput(each, dlogp, rest[0] if rest else None)


class RowKernelStage(MiddleStage):
    """The stage inside the Triton row kernel, between a row's statistics and its gradient."""

    def gradient_(
        self,
        rows: slice,
        logits: Tensor,
        target: Tensor,
        transform: Transform,
        out_dtype: torch.dtype,
    ) -> tuple[RowStats, Tensor]:
        """Statistics of a tile's rows, and the gradient of its raw logits in their storage."""
        from grpo_kernels.backends.triton.row_loss import row_loss_

        function, values = self.function(rows)
        stats, each, dlogits = row_loss_(logits, target, transform, function, values, out_dtype)
        self._contributions.append(each)
        return stats, dlogits

    def function(self, rows: slice) -> tuple[RowFunction, tuple[Tensor | None, ...]]:
        """What the row kernel calls for each of the ``rows``, and the values it gets."""
        from grpo_kernels.backends.triton.row_loss import RowFunction

        part, weights = self._part(rows)
        printed = _printed_stage(self.config, _present(part))
        function = RowFunction(
            device_function=printed.device_function,
            has_dentropy=len(printed.output_dtypes) > 2,
        )
        return function, token_inputs(weights.policy.float(), None, part, weights)[2:]


def choose_middle(
    backend: str, scope: str, batch: TokenBatch, config: LossConfig, dtype: torch.dtype
) -> MiddleChoice:
    """A printed function for Triton and token scope, if the loss can be traced; else torch ops."""
    if backend != "triton":
        return MiddleChoice("torch", "middle stage: torch ops")
    if scope != "token":
        reason = f"the loss has {scope} scope"
        return MiddleChoice("triton segments", f"middle stage: Triton sums, torch ops: {reason}")
    why_not = _why_not_printed(config, _present(batch))
    if why_not is not None:
        return MiddleChoice("torch", f"middle stage: torch ops, because {why_not}")
    # these need the gradients of the statistics themselves: to scale them, or to spread them
    if dtype == torch.float16 or batch.sampling_mask is not None:
        return MiddleChoice("printed", "middle stage: a Triton kernel, printed from the loss")
    return MiddleChoice("row kernel", "middle stage: in the row kernel, printed from the loss")


def _present(batch: TokenBatch) -> tuple[str, ...]:
    """The fields of :class:`TokenInputs` that this batch fills."""
    optional = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    missing = {name for name in optional if getattr(batch, name) is None}
    return tuple(name for name in TokenInputs._fields if name not in missing)


@functools.lru_cache(maxsize=256)
def _why_not_printed(config: LossConfig, present: tuple[str, ...]) -> str | None:
    from grpo_kernels.backends.triton.codegen import UntraceableError

    try:
        _printed_stage(config, present)
    except UntraceableError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=256)
def _printed_stage(config: LossConfig, present: tuple[str, ...]) -> Any:
    """The kernel of ``run_stage`` for this loss: traced, derivative included, and printed.

    It takes all fields of :class:`TokenInputs`, and reads those that are ``present``.
    """
    from grpo_kernels.backends.triton.codegen import PointwiseKernel

    names = TokenInputs._fields

    def stage(*vectors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, vectors, strict=True))
        x = TokenInputs(*(given[name] if name in present else None for name in names))  # type: ignore[arg-type]
        output = run_stage(x, _NO_SEGMENTS, config)
        return tuple(vector for vector in output if vector is not None)

    return PointwiseKernel.trace(stage, len(names), names)


def _no_segments(values: Tensor) -> Tensor:
    raise AssertionError("a loss of token scope reduces nothing over sequences")


_NO_SEGMENTS = Segments(_no_segments, _no_segments, _no_segments)


class _SegmentSum(torch.autograd.Function):
    """Triton's sums over sequences; the gradient gives each token its sequence's."""

    @staticmethod
    def forward(ctx, values: Tensor, batch: TokenBatch) -> Tensor:
        from grpo_kernels.backends.triton.segment_sum import segment_sum

        ctx.batch = batch
        return segment_sum(values, batch.cu_seqlens)

    @staticmethod
    def backward(ctx, dsums: Tensor) -> tuple[Tensor, None]:
        return ctx.batch.expand(dsums), None


def _triton_segments(batch: TokenBatch) -> Segments:
    def total(values: Tensor) -> Tensor:
        return _SegmentSum.apply(values, batch)

    def mean(values: Tensor) -> Tensor:
        return total(values) / batch.cu_seqlens.diff().clamp(min=1)

    return Segments(total, mean, batch.expand)
