"""A small GRPO trainer built on the fused losses of ``grpo_kernels``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainer.cli.arguments import (
        ModelConfig,
        ScriptArguments,
        get_peft_config,
        get_quantization_config,
    )
    from grpo_trainer.cli.parser import TrlParser
    from grpo_trainer.config import GRPOConfig
    from grpo_trainer.data import Column, MicroBatch, Prompts, Sample, Scored, Term
    from grpo_trainer.monitor import RichProgressCallback
    from grpo_trainer.trainer import GRPOTrainer
    from grpo_trainer.vllm import VLLMClient

__all__ = [
    "Column",
    "GRPOConfig",
    "GRPOTrainer",
    "MicroBatch",
    "ModelConfig",
    "Prompts",
    "RichProgressCallback",
    "Sample",
    "Scored",
    "ScriptArguments",
    "Term",
    "TrlParser",
    "VLLMClient",
    "get_peft_config",
    "get_quantization_config",
]

_ELSEWHERE = {
    **dict.fromkeys(("Column", "MicroBatch", "Prompts", "Sample", "Scored", "Term"), "data"),
    "GRPOConfig": "config",
    "GRPOTrainer": "trainer",
    "RichProgressCallback": "monitor",
    "TrlParser": "cli.parser",
    "VLLMClient": "vllm",
}


def __getattr__(name: str) -> Any:
    """Import each name on first use: a server needs only one small module."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = _ELSEWHERE.get(name, "cli.arguments")
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
