"""Fused policy-gradient losses over an LM head: no (tokens, vocabulary) logits in memory."""

from grpo_kernels.backends import available_backends
from grpo_kernels.batch import SamplingMask, TokenBatch
from grpo_kernels.engine import Bounded
from grpo_kernels.head import Head, HeadLoRA, Transform
from grpo_kernels.linear_logprobs import (
    LinearLogprobs,
    LogprobsPlan,
    explain_logprobs,
    linear_logprobs,
)
from grpo_kernels.linear_policy_loss import FusedLinearGRPOLoss, explain, linear_policy_loss
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, policy_loss
from grpo_kernels.schedule import Plan
from grpo_kernels.version import VERSION
from grpo_kernels.warm_up import warm_up

__version__ = VERSION

__all__ = [
    "Bounded",
    "FusedLinearGRPOLoss",
    "Head",
    "HeadLoRA",
    "LinearLogprobs",
    "LogprobsPlan",
    "LossConfig",
    "Metrics",
    "Plan",
    "PolicyLossOutput",
    "SamplingMask",
    "TokenBatch",
    "Transform",
    "available_backends",
    "explain",
    "explain_logprobs",
    "linear_logprobs",
    "linear_policy_loss",
    "policy_loss",
    "warm_up",
]
