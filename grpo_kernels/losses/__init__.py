"""Policy losses as plain torch functions of per-token vectors. No kernels in here."""

from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.metrics import Metrics, Stat
from grpo_kernels.losses.policy_loss import PolicyLossOutput, policy_loss
from grpo_kernels.losses.registry import LOSSES, NamedLoss, register_loss
from grpo_kernels.losses.surrogates import Surrogate, register_surrogate

__all__ = [
    "LOSSES",
    "LossConfig",
    "Metrics",
    "NamedLoss",
    "PolicyLossOutput",
    "Stat",
    "Surrogate",
    "policy_loss",
    "register_loss",
    "register_surrogate",
]
