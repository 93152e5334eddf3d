"""Runs TRL's trainers on our kernels: the public names. Importing it imports TRL."""

from grpo_kernels.integrations.trl_head import (
    PROBE,
    SWITCH,
    add_fused_lm_head,
    chunked_divergence_loss,
    disable,
    enable,
    enabled,
)
from grpo_kernels.integrations.trl_trainer import FusedGRPOTrainer

__all__ = [
    "PROBE",
    "SWITCH",
    "FusedGRPOTrainer",
    "add_fused_lm_head",
    "chunked_divergence_loss",
    "disable",
    "enable",
    "enabled",
]
