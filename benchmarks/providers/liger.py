"""Liger Kernel: its chunked GRPO loss, its Triton kernels, and its Hopper kernels in CuTe DSL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.exact import softcapped
from benchmarks.problem import Problem
from benchmarks.providers.base import Provider
from benchmarks.providers.baselines import (
    loss_arguments,
    no_entropy,
    no_softcap,
    run_cross_entropy,
)
from benchmarks.providers.eager import Scores, run_with
from benchmarks.shapes import Case

_PACKAGE = "liger-kernel"


def _chunked(problem: Problem) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    # compiling concerns the (B, L) loss formula only, and takes longer than a small run
    function = LigerFusedLinearGRPOLoss(
        compiled=False,
        use_ref_model=problem.ref_logprobs is not None,
        **loss_arguments(problem.loss),
    )
    with _tf32_gemms(problem):
        loss, _ = function(
            problem.hidden,
            problem.weight,
            problem.target,
            problem.mask.int(),
            problem.advantages,
            ref_per_token_logps=problem.ref_logprobs,
            old_per_token_logps=problem.old_logprobs,
        )
    return loss


@contextmanager
def _tf32_gemms(problem: Problem) -> Iterator[None]:
    """Allow TF32 for 16-bit inputs on a GPU: Liger multiplies their gradients in fp32."""
    before = torch.get_float32_matmul_precision()
    if problem.hidden.is_cuda and problem.case.dtype != "fp32":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _only_losses(case: Case) -> str | None:
    if case.work.kind != "loss":
        return "a GRPO loss only"
    return no_softcap(case)


def _triton_loss(problem: Problem) -> Tensor:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    # it wants the logits of L + 1 positions, and ignores the last, as model outputs have it
    hidden = torch.nn.functional.pad(problem.hidden, (0, 0, 0, 1))
    logits = torch.nn.functional.linear(hidden, problem.weight)  # (B, L + 1, V)
    settings = loss_arguments(problem.loss)
    loss, _ = triton_grpo_loss(
        softcapped(logits, problem.softcap),
        problem.old_logprobs,
        problem.ref_logprobs,
        problem.target,
        problem.advantages,
        problem.mask.int(),
        eps_low=settings.pop("epsilon_low"),
        eps_high=settings.pop("epsilon_high"),
        reduce=True,
        **settings,
    )
    return loss


def _cross_entropy(problem: Problem, reduction: str) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    function = LigerFusedLinearCrossEntropyLoss(reduction=reduction, softcap=problem.softcap)
    return function(problem.weight, problem.hidden.flatten(0, 1), problem.target.flatten())


def _sm90_head(problem: Problem, with_entropy: bool) -> Scores:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    outputs = LigerFusedScaledCrossEntropySM90Function.apply(
        problem.hidden.flatten(0, 1),
        problem.weight,
        problem.target.flatten(),
        1.0,  # temperature
        -100,  # ignored target
        1,  # has no effect any more
        with_entropy,
    )
    nll, entropy = outputs if with_entropy else (outputs, None)
    shape = problem.target.shape
    return -nll.view(shape), None if entropy is None else entropy.view(shape)


def _own_head(problem: Problem, with_entropy: bool) -> Scores:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    inputs = problem.hidden, problem.weight, problem.target
    return LigerFusedLinearGRPOFunction.chunk_forward(*inputs), None


def _own_head_unable(case: Case) -> str | None:
    gradients = None if case.work.kind == "forward" else "its gradients are liger's"
    return no_entropy(case) or no_softcap(case) or gradients


def _sm90_unable(case: Case) -> str | None:
    return "bf16 only" if case.dtype != "bf16" else no_softcap(case)


LIGER = Provider(
    name="liger",
    note="LigerFusedLinearGRPOLoss, one sequence per chunk, loss formula not compiled; TF32 is "
    "allowed for its fp32 products of bf16 inputs on a GPU",
    run=run_with(_own_head, loss=_chunked),
    unable=_only_losses,
    packages=(_PACKAGE,),
)
LIGER_TRITON = Provider(
    name="liger-triton",
    note="a loss: full logits by torch, then triton_grpo_loss, in place; else "
    "LigerFusedLinearCrossEntropyLoss with its defaults",
    run=run_cross_entropy(_cross_entropy, loss=_triton_loss),
    unable=no_entropy,
    packages=(_PACKAGE,),
    gpu=True,
)
LIGER_SM90 = Provider(
    name="liger-sm90",
    note="LigerFusedScaledCrossEntropySM90Function (CuTe DSL), the rest eager; no entropy in a "
    "loss; dweight is computed for a frozen head too",
    run=run_with(_sm90_head),
    unable=_sm90_unable,
    packages=(_PACKAGE, "nvidia-cutlass-dsl", "cuda-bindings"),
    capability=(9, 0),
    slow_start=True,
)
LIGER_HEAD = Provider(
    name="liger-head",
    note="LigerFusedLinearGRPOFunction.chunk_forward: the log-probabilities inside liger's loss",
    run=run_with(_own_head),
    unable=_own_head_unable,
    packages=(_PACKAGE,),
)
