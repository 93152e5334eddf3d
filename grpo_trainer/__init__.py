"""A thin GRPO trainer on top of the fused losses of ``grpo_kernels``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig
    from grpo_trainer.rollout import VLLMClient
    from grpo_trainer.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "VLLMClient"]

_MODULES = {
    "GRPOConfig": "grpo_trainer.config",
    "GRPOTrainer": "grpo_trainer.trainer",
    "VLLMClient": "grpo_trainer.rollout",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for when it is asked for: a server needs one small module alone."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
