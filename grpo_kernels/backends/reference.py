"""The eager reference: full logits and autograd; slow, for reading and testing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import LEAST_LOGP, OutputSpec, RowStats, transformed
from grpo_kernels.backends.divergence import Divergence, TopK
from grpo_kernels.backends.topk import completed
from grpo_kernels.batch import SamplingMask
from grpo_kernels.head import Head, logits_dtype, matmul_precision, stats_dtype


def reference_logprobs(
    hidden: Tensor,
    head: Head,
    target: Tensor,
    precision: str,
    sampling_mask: SamplingMask | None = None,
    outputs: OutputSpec = OutputSpec(),  # noqa: B008
) -> RowStats:
    """Compute statistics of (T,) targets, differentiable in hidden, weight, bias and an adapter.

    The GEMMs of the backward are torch's, and follow torch's precision switches.
    """
    scores = _scores(hidden, head, precision)
    logp = scores.log_softmax(-1)  # (T, V)
    p = logp.exp()
    masked = None
    if sampling_mask is not None:
        member = torch.zeros_like(scores, dtype=torch.bool)
        member[sampling_mask.rows, sampling_mask.indices] = True
        member.scatter_(-1, target[:, None], True)
        own = scores.gather(-1, target[:, None]).squeeze(-1)
        masked = own - scores.masked_fill(~member, float("-inf")).logsumexp(-1)
    stats = RowStats(
        logprobs=logp.gather(-1, target[:, None]).squeeze(-1),
        # a logit of -inf has probability 0 and adds nothing
        entropy=-(p * logp.clamp(min=LEAST_LOGP)).sum(-1),
        lse=scores.logsumexp(-1).double(),
        is_top1=scores.argmax(-1) == target,
        sum_sq_probs=(p * p).sum(-1),
        max_logit=scores.amax(-1),
        min_logit=scores.amin(-1),
        mean_logit=scores.mean(-1),
        masked_logprobs=masked,
    )
    if not outputs.top_k:
        return stats
    first = scores.argsort(dim=-1, descending=True, stable=True)[:, : outputs.top_k]
    return completed(stats, target, logp.gather(-1, first), first)


def reference_divergence(
    hidden: Tensor,
    head: Head,
    teacher: tuple[Tensor, Head] | TopK,
    precision: str,
    divergence: Divergence,
) -> tuple[Tensor, Tensor]:
    """Compute divergence and entropy (T,), differentiable like :func:`reference_logprobs`.

    Both are computed in fp64: in fp32, the gradient loses digits where student and teacher nearly
    agree.
    """
    rounded = _scores(hidden, head, precision)
    scores = rounded.double()
    logp = scores.log_softmax(-1)
    entropy = -(logp.exp() * logp.clamp(min=LEAST_LOGP)).sum(-1)
    if isinstance(teacher, TopK):
        tail = _lse_without(scores, teacher.indices)
        logp = torch.cat([scores.gather(-1, teacher.indices), tail], -1).log_softmax(-1)
        teacher_logp = teacher.with_tail
    else:
        teacher_logp = _scores(*teacher, precision).double().log_softmax(-1)
    terms, _ = divergence.terms(_AtLeast.apply(logp), teacher_logp.clamp(min=LEAST_LOGP))
    return terms.sum(-1).to(rounded.dtype), entropy.to(rounded.dtype)


class _AtLeast(torch.autograd.Function):
    """A clamp to at least ``LEAST_LOGP`` that passes the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(logp: Tensor) -> Tensor:
        return logp.clamp(min=LEAST_LOGP)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        return

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _lse_without(scores: Tensor, indices: Tensor) -> Tensor:  # (T, V), (T, k) -> (T, 1)
    """Return the logsumexp of the other columns; not differentiable if they are all -inf."""
    others = scores.scatter(-1, indices, float("-inf"))
    empty = (others == float("-inf")).all(-1, keepdim=True)
    lse = others.masked_fill(empty, 0.0).logsumexp(-1, keepdim=True)
    return lse.masked_fill(empty, float("-inf"))


def _scores(hidden: Tensor, head: Head, precision: str) -> Tensor:  # (T, V)
    dtype = logits_dtype(hidden.dtype, precision)
    exact = torch.autocast(hidden.device.type, enabled=False)
    with matmul_precision(hidden.device, precision), exact:
        weight = head.weight.to(hidden.dtype)  # wider under autocast
        if head.lora is None:
            logits = hidden.to(dtype) @ weight.to(dtype).t()
        else:  # so that the sum is rounded once
            wide = stats_dtype(hidden.dtype)
            x, a, b = (factor.to(wide) for factor in (hidden, head.lora.a, head.lora.b))
            update = head.lora.scaling * (x @ a.t()) @ b.t()
            logits = (x @ weight.to(wide).t() + update).to(dtype)
    if head.bias is not None:
        logits = (logits + head.bias).to(logits.dtype)
    return transformed(logits, head.transform)[0]
