"""Fused policy-gradient losses over an LM head: no (tokens, vocabulary) logits in memory."""

from grpo_kernels.backends import available_backends
from grpo_kernels.batch import (
    RankRows,
    SamplingMask,
    TokenBatch,
    context_parallel_rows,
    next_token_targets,
)
from grpo_kernels.common import VERSION
from grpo_kernels.engine import Bounded, DivergencePlan
from grpo_kernels.fused_head import FusedHead
from grpo_kernels.head import Head, HeadLoRA, Transform, VocabShard
from grpo_kernels.linear_divergence import (
    LinearDivergence,
    explain_divergence,
    linear_divergence,
)
from grpo_kernels.linear_logprobs import (
    LinearLogprobs,
    LogprobsPlan,
    explain_logprobs,
    linear_logprobs,
)
from grpo_kernels.linear_policy_loss import FusedLinearGRPOLoss, explain, linear_policy_loss
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, policy_loss
from grpo_kernels.schedule import Plan
from grpo_kernels.warm_up import warm_up

__version__ = VERSION

__all__ = [
    "Bounded",
    "DivergencePlan",
    "FusedHead",
    "FusedLinearGRPOLoss",
    "Head",
    "HeadLoRA",
    "LinearDivergence",
    "LinearLogprobs",
    "LogprobsPlan",
    "LossConfig",
    "Metrics",
    "Plan",
    "PolicyLossOutput",
    "RankRows",
    "SamplingMask",
    "TokenBatch",
    "Transform",
    "VocabShard",
    "available_backends",
    "context_parallel_rows",
    "explain",
    "explain_divergence",
    "explain_logprobs",
    "linear_divergence",
    "linear_logprobs",
    "linear_policy_loss",
    "next_token_targets",
    "policy_loss",
    "warm_up",
]
