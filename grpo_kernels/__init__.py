"""Fused policy-gradient losses over an LM head: no (tokens, vocabulary) logits in memory."""

from grpo_kernels.backends.registry import available_backends
from grpo_kernels.batch.sampling_mask import SamplingMask
from grpo_kernels.batch.token_batch import TokenBatch
from grpo_kernels.explain_logprobs import LogprobsPlan, explain_logprobs
from grpo_kernels.head.lora import HeadLoRA
from grpo_kernels.linear_logprobs import LinearLogprobs, linear_logprobs
from grpo_kernels.linear_policy_loss import FusedLinearGRPOLoss, linear_policy_loss
from grpo_kernels.losses import LossConfig, Metrics, PolicyLossOutput, policy_loss
from grpo_kernels.schedule.plan import Plan, explain
from grpo_kernels.version import VERSION

__version__ = VERSION

__all__ = [
    "FusedLinearGRPOLoss",
    "HeadLoRA",
    "LinearLogprobs",
    "LogprobsPlan",
    "LossConfig",
    "Metrics",
    "Plan",
    "PolicyLossOutput",
    "SamplingMask",
    "TokenBatch",
    "available_backends",
    "explain",
    "explain_logprobs",
    "linear_logprobs",
    "linear_policy_loss",
    "policy_loss",
]
