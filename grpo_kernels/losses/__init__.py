"""The losses: plain torch on (T,) vectors, each defined once. Imports the batch, but no kernel."""

from grpo_kernels.common import check_name, check_number
from grpo_kernels.losses.config import LossConfig
from grpo_kernels.losses.metrics import Metrics, Stat
from grpo_kernels.losses.registry import LOSSES, NamedLoss, register_loss
from grpo_kernels.losses.surrogates import Surrogate
from grpo_kernels.losses.terms import AGGREGATIONS, CORRECTION_MODES, Terms, top_entropy_gate
from grpo_kernels.losses.token_loss import (
    PolicyLossOutput,
    TokenInputs,
    Weights,
    check_loss_inputs,
    loss_stats,
    policy_loss,
    run_stage,
    static_weights,
    token_inputs,
    weighted_loss,
)
