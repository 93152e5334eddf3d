"""A thin GRPO trainer on top of the fused losses of ``grpo_kernels``."""

from grpo_trainer.config import GRPOConfig
from grpo_trainer.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
