"""Statistics of a head whose backward adds the weight's gradient to a sink."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats
from grpo_kernels.engine.gradients import Needs, StatsGradients
from grpo_kernels.engine.ops import (
    DIFFERENTIABLE,
    HeadOptions,
    Tensors,
    head_gradients,
    linear_logprobs_forward,
)
from grpo_kernels.engine.topk import UNRANKED
from grpo_kernels.engine.weight_sink import WeightSink
from grpo_kernels.head.derivatives import first_derivative_only


def sunk_stats(tensors: Tensors, options: HeadOptions, sink: WeightSink) -> RowStats:
    """As ``head_stats``; autograd gets no gradient of the weight, ``sink`` gets it instead."""
    logp, entropy, lse, masked_logp = _Sunk.apply(options, sink, *tensors)
    sampling_mask = masked_logp if tensors.sampling_mask is not None else None
    return RowStats(logp, entropy, lse, masked_logp=sampling_mask)


class _Sunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: HeadOptions, sink: WeightSink, *inputs: Tensor | None) -> Any:
        tensors = Tensors(*inputs)  # type: ignore[arg-type]
        tensors = tensors._replace(weight=tensors.weight.to(tensors.hidden.dtype))
        stats = RowStats(*linear_logprobs_forward(*tensors, *options, False, *UNRANKED))
        ctx.options, ctx.sink = options, sink
        ctx.save_for_backward(*inputs, stats.logp, stats.entropy, stats.lse)
        ctx.mark_non_differentiable(stats.lse)
        return stats.logp, stats.entropy, stats.lse, stats.masked_logp

    @staticmethod
    @first_derivative_only("linear_policy_loss")
    def backward(ctx: Any, saved: Any, *outer: Tensor) -> Any:
        dlogp, dentropy, _, dmasked = outer
        *inputs, logp, entropy, lse = saved
        tensors = Tensors(*inputs)
        needed = dict(zip(Tensors._fields, ctx.needs_input_grad[2:], strict=True))
        needs = Needs(**{name: needed[name] for name in DIFFERENTIABLE}, weight_sink=ctx.sink)
        wanted = StatsGradients(dlogp, dentropy, dmasked if dmasked.numel() else None)
        found = head_gradients(tensors, ctx.options, RowStats(logp, entropy, lse), wanted, needs)
        by_name = {name: x for name, x in found._asdict().items() if x is not None}
        inputs = zip(Tensors._fields, tensors, strict=True)
        gradients = (by_name[name].to(x.dtype) if name in by_name else None for name, x in inputs)
        return None, None, *gradients
