"""Numerics that are compared but not worth timing."""

from __future__ import annotations

from torch import Tensor

from benchmarks.providers import liger
from benchmarks.providers.base import Provider
from benchmarks.providers.baselines import no_entropy, no_softcap
from benchmarks.providers.eager import head, run_with
from benchmarks.shapes import Case


def _upcast(
    hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    return head(hidden.float(), weight.float(), target, softcap, with_entropy)


def _rounded_twice(
    hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Round the logits to the input dtype, and what follows them in fp32 as well."""
    logprobs, entropy = head(hidden, weight, target, softcap, with_entropy)
    return logprobs.to(hidden.dtype), None if entropy is None else entropy.to(hidden.dtype)


def _liger_head(
    hidden: Tensor, weight: Tensor, target: Tensor, softcap: float | None, with_entropy: bool
) -> tuple[Tensor, None]:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    return LigerFusedLinearGRPOFunction.chunk_forward(hidden, weight, target), None


def _sixteen_bits(case: Case) -> str | None:
    return "the same as eager: nothing is rounded" if case.dtype == "fp32" else None


def _forward_in_sixteen_bits(case: Case) -> str | None:
    return _sixteen_bits(case) or _forward_only(case, "a loss takes no 16-bit log-probabilities")


def _liger_forward(case: Case) -> str | None:
    return no_entropy(case) or no_softcap(case) or _forward_only(case, "its gradients are liger's")


def _forward_only(case: Case, reason: str) -> str | None:
    return None if case.work.kind == "forward" else reason


EAGER_FP32 = Provider(
    name="eager-fp32",
    note="eager with hidden states and head cast to fp32 first: what ours is held against",
    run=run_with(_upcast),
    unable=_sixteen_bits,
)
VERL_STYLE = Provider(
    name="verl-style",
    note="the numerics of verl's fused head in torch, written anew: logits rounded to the input "
    "dtype, softmax in fp32, log-probabilities and entropies rounded to the input dtype",
    run=run_with(_rounded_twice),
    unable=_forward_in_sixteen_bits,
)
LIGER_HEAD = Provider(
    name="liger-head",
    note="LigerFusedLinearGRPOFunction.chunk_forward: the log-probabilities inside liger's loss",
    run=run_with(_liger_head),
    unable=_liger_forward,
    packages=liger.LIGER.packages,
)
ADDED = (EAGER_FP32, VERL_STYLE, LIGER_HEAD)
