"""The loss between statistics and gradients: torch ops, or a generated kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, RowStats, StatsGrad
from grpo_kernels.batch import TOKEN_FIELDS, Segments, TokenBatch
from grpo_kernels.losses import (
    LossConfig,
    TokenInputs,
    Weights,
    run_stage,
    token_inputs,
)

# of :func:`run_stage`
_EachWithGradients = tuple[Tensor, Tensor, Tensor | None]
_NO_SEGMENTS: Any = None  # of a loss of token scope, which reduces nothing over sequences


class LossStage:
    """The callback between a chunk's statistics and its logit gradients: torch ops.

    Args:
        batch: the rows that it is called for, chunk by chunk.
        weights: theirs in the whole batch.
        config: the loss.
        dtype: of statistics.
        entropy_gate: (T,), of a loss that gates tokens by the entropy of all.
    """

    words: ClassVar[str] = "torch ops"

    def __init__(
        self,
        batch: TokenBatch,
        weights: Weights,
        config: LossConfig,
        dtype: torch.dtype,
        entropy_gate: Tensor | None = None,
    ) -> None:
        # log-probabilities and entropy come with each chunk
        self._inputs = token_inputs(batch, weights, dtype)
        self._batch, self._config, self._entropy_gate = batch, config, entropy_gate
        self._contributions: list[Tensor] = []

    def __call__(self, rows: slice, stats: RowStats) -> StatsGrad:
        x = self._inputs.rows(rows)._replace(logprobs=policy_logp(stats), entropy=stats.entropy)
        each, dlogp, dentropy = self._run(x, rows)
        self._contributions.append(each)
        if stats.masked_logprobs is None:
            return StatsGrad(dlogp, dentropy)
        return StatsGrad(None, dentropy, dlogp)

    def loss(self) -> Tensor:
        """Return the () loss of all rows seen, summed in fp64 and in a fixed order."""
        if not self._contributions:
            return self._inputs.logprobs.new_zeros(())
        parts = self._contributions
        each = parts[0] if len(parts) == 1 else torch.cat(parts)
        return each.sum(dtype=torch.float64).to(each.dtype)

    def _run(self, x: TokenInputs, rows: slice) -> _EachWithGradients:
        run = partial(run_stage, x, self._segments(rows), self._config, self._entropy_gate)
        autograd = torch._C.DispatchKey.AutogradFunctionality
        if not torch._C._dispatch_tls_is_dispatch_key_excluded(autograd):
            return run()
        # inside a custom op torch switches autograd off, for the thread that runs it
        stream = torch.cuda.current_stream() if x.logprobs.device.type == "cuda" else None
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_on_stream, run, stream).result()

    def _segments(self, rows: slice) -> Segments:
        if self._config.scope(self._batch.rollout_logprobs is not None) == "token":
            return _NO_SEGMENTS
        segments = self._batch.segments
        if rows == slice(0, self._batch.num_tokens):
            return segments
        return segments.narrow(rows.start, rows.stop)


def policy_logp(stats: RowStats) -> Tensor:
    """Return the policy's log-probabilities: renormalised where there is a sampling mask."""
    return stats.logprobs if stats.masked_logprobs is None else stats.masked_logprobs


def _on_stream(run: Callable[[], Any], stream: torch.cuda.Stream | None) -> Any:
    with torch.cuda.stream(stream):
        return run()


class SegmentStage(LossStage):
    """Triton's sums over sequences, torch ops for the rest."""

    words = "Triton sums over sequences, torch ops"

    def _segments(self, rows: slice) -> Segments:
        part = self._batch.segments.narrow(rows.start, rows.stop)
        return _TritonSegments(part.cu_seqlens, part.total)


class GeneratedStage(LossStage):
    """A kernel that is generated from the loss."""

    words = "a Triton kernel, generated from the loss"

    def _run(self, x: TokenInputs, rows: slice) -> _EachWithGradients:
        present = tuple(name for name, value in x._asdict().items() if value is not None)
        kernel = _generated(self._config, present)
        # what is absent is not read
        each, dlogp, *rest = kernel(*(x.logprobs if value is None else value for value in x))
        return each, dlogp, rest[0] if rest else None


def choose_stage(backend: Backend, batch: TokenBatch, config: LossConfig) -> type[LossStage]:
    """Choose generated code where backend and loss allow it, else torch ops."""
    if not backend.generates:
        return LossStage
    if config.scope(batch.rollout_logprobs is not None) != "token":
        return SegmentStage if batch.sequence_group is None else LossStage
    return LossStage if why_not_generated(batch, config) is not None else GeneratedStage


def why_not_generated(batch: TokenBatch, config: LossConfig) -> str | None:
    """Say why no kernel can be generated from the loss; None if one can."""
    absent = {name for name in TOKEN_FIELDS if getattr(batch, name) is None}
    if config.entropy_coef == 0:
        absent.add("entropy_weight")
    return _why_not(config, tuple(name for name in TokenInputs._fields if name not in absent))


@functools.lru_cache(maxsize=256)
def _why_not(config: LossConfig, present: tuple[str, ...]) -> str | None:
    from grpo_kernels.backends.triton.codegen import UntraceableError

    try:
        _generated(config, present)
    except UntraceableError as error:
        return str(error)
    return None


@functools.lru_cache(maxsize=256)
def _generated(config: LossConfig, present: tuple[str, ...]) -> Any:
    """Return the generated kernel of ``run_stage`` for this loss, derivative included.

    It takes all fields of :class:`TokenInputs`, and reads those that are ``present``.
    """
    from grpo_kernels.backends.triton.codegen import PointwiseKernel

    names = TokenInputs._fields

    def stage(*vectors: Tensor) -> tuple[Tensor, ...]:
        given = dict(zip(names, vectors, strict=True))
        x = TokenInputs(*(given[name] if name in present else None for name in names))  # type: ignore[arg-type]
        output = run_stage(x, _NO_SEGMENTS, config)
        return tuple(vector for vector in output if vector is not None)

    return PointwiseKernel.trace(stage, names)


class _TritonSegments(Segments):
    def sum(self, values: Tensor) -> Tensor:
        return _SegmentSum.apply(values, self)


class _SegmentSum(torch.autograd.Function):
    """Triton's sums over sequences; the gradient gives each token its sequence's."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, segments: Segments) -> Tensor:
        from grpo_kernels.backends import triton

        ctx.segments = segments
        return triton.segment_sum(values, segments.cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.expand(dsums), None
