"""Liger Kernel's chunked GRPO loss."""

from __future__ import annotations

from benchmarks.problem import CONFIG, Problem, Result
from benchmarks.providers.base import Provider, with_gradients


def _loss(problem: Problem) -> Result:
    import torch
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    high = CONFIG.epsilon if CONFIG.epsilon_high is None else CONFIG.epsilon_high
    # compiling concerns the (B, L) loss formula only, and takes longer than a small run
    function = LigerFusedLinearGRPOLoss(
        beta=CONFIG.beta,
        compiled=False,
        use_ref_model=False,
        epsilon_low=CONFIG.epsilon,
        epsilon_high=high,
        loss_type=CONFIG.loss_type,
        temperature=CONFIG.temperature,
    )
    loss, _ = function(
        problem.hidden,
        problem.weight,
        problem.target,
        torch.ones_like(problem.target),
        problem.advantages,
        old_per_token_logps=problem.old_logprobs,
    )
    return with_gradients(problem, loss)


LIGER = Provider(
    name="liger",
    note="LigerFusedLinearGRPOLoss, one sequence per chunk, loss formula not compiled",
    loss=_loss,
    package="liger-kernel",
)
