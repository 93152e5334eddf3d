"""The loss of a chunk and its gradients: torch ops, or a generated kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import Backend, RowStats, StatsGrad
from grpo_kernels.batch import TOKEN_FIELDS, Segments, TokenBatch
from grpo_kernels.losses import LossConfig, TokenInputs, run_stage

# how the loss of a chunk is computed
TORCH_OPS = "torch ops"
TRITON_SUMS = "Triton sums over sequences, torch ops"
GENERATED_KERNEL = "a Triton kernel, generated from the loss"

_NO_SEGMENTS: Any = None  # for losses of token scope, which do not reduce over sequences


def chunk_loss(
    stats: RowStats,  # of the chunk
    part: slice,  # the chunk's tokens in the batch
    *,
    inputs: TokenInputs,  # of all tokens of the batch
    batch: TokenBatch,
    config: LossConfig,
    method: str,
    entropy_gate: Tensor | None = None,  # (T,), if the loss gates tokens by the entropy of all
) -> tuple[Tensor, StatsGrad]:
    """Return (C,) contributions to the loss, and its gradients with respect to the statistics."""
    x = inputs.rows(part)._replace(logprobs=policy_logprobs(stats), entropy=stats.entropy)
    if method == GENERATED_KERNEL:
        losses, dlogp, dentropy = _run_kernel(x, config)
    else:
        segments = _segments(batch, part, config, method)
        losses, dlogp, dentropy = _run_torch(x, segments, config, entropy_gate)
    if stats.masked_logprobs is None:
        return losses, StatsGrad(dlogp, dentropy)
    return losses, StatsGrad(None, dentropy, dmasked=dlogp)


def policy_logprobs(stats: RowStats) -> Tensor:
    """Return the policy's log-probabilities, renormalized if there is a sampling mask."""
    return stats.logprobs if stats.masked_logprobs is None else stats.masked_logprobs


def sum_losses(losses: list[Tensor], like: Tensor) -> Tensor:
    """Return the () sum of contributions, in fp64 and in a fixed order; 0 in the dtype of ``like``
    if there are none."""
    if not losses:
        return like.new_zeros(())
    joined = losses[0] if len(losses) == 1 else torch.cat(losses)
    return joined.sum(dtype=torch.float64).to(joined.dtype)


def _segments(batch: TokenBatch, part: slice, config: LossConfig, method: str) -> Segments:
    if method == TRITON_SUMS:
        narrowed = batch.segments.narrow(part.start, part.stop)
        return _TritonSegments(narrowed.cu_seqlens, narrowed.total)
    if config.scope(batch.rollout_logprobs is not None) == "token":
        return _NO_SEGMENTS
    if part == slice(0, batch.num_tokens):
        return batch.segments
    return batch.segments.narrow(part.start, part.stop)


def _run_torch(
    x: TokenInputs, segments: Segments, config: LossConfig, entropy_gate: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    run = partial(run_stage, x, segments, config, entropy_gate)
    autograd = torch._C.DispatchKey.AutogradFunctionality
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(autograd):
        return run()
    # inside a custom op torch disables autograd in the current thread, so use another thread
    stream = torch.cuda.current_stream() if x.logprobs.device.type == "cuda" else None
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_on_stream, run, stream).result()


def _on_stream(run: Callable[[], Any], stream: torch.cuda.Stream | None) -> Any:
    with torch.cuda.stream(stream):
        return run()


def _run_kernel(x: TokenInputs, config: LossConfig) -> tuple[Tensor, Tensor, Tensor | None]:
    present = tuple(name for name, value in x._asdict().items() if value is not None)
    kernel = _generated(config, present)
    # absent inputs are not read
    losses, dlogp, *rest = kernel(*(x.logprobs if value is None else value for value in x))
    return losses, dlogp, rest[0] if rest else None


def choose_method(backend: Backend, batch: TokenBatch, config: LossConfig) -> str:
    """Choose generated code if backend and loss allow it, otherwise torch ops."""
    if not backend.generates:
        return TORCH_OPS
    if config.scope(batch.rollout_logprobs is not None) != "token":
        return TRITON_SUMS if batch.sequence_group is None else TORCH_OPS
    return TORCH_OPS if why_not_generated(batch, config) is not None else GENERATED_KERNEL


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

    It accepts all fields of :class:`TokenInputs`, and reads the ones in ``present``.
    """
    from grpo_kernels.backends.triton.codegen import PointwiseKernel

    names = TokenInputs._fields

    def stage(*vectors: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, vectors, strict=True))
        x = TokenInputs(*(values[name] if name in present else None for name in names))  # type: ignore[arg-type]
        output = run_stage(x, _NO_SEGMENTS, config)
        return tuple(vector for vector in output if vector is not None)

    return PointwiseKernel.trace(stage, names)


class _TritonSegments(Segments):
    def sum(self, values: Tensor) -> Tensor:
        return _SegmentSum.apply(values, self)


class _SegmentSum(torch.autograd.Function):
    """Triton's sums over sequences; each token gets the gradient of its sequence's sum."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, segments: Segments) -> Tensor:
        from grpo_kernels.backends import triton

        ctx.segments = segments
        return triton.segment_sum(values, segments.cu_seqlens)

    @staticmethod
    def backward(ctx: Any, dsums: Tensor) -> tuple[Tensor, None]:
        return ctx.segments.expand(dsums), None
