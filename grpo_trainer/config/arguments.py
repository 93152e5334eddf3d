"""What kinds of objects the trainer is given, checked before anything is loaded."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from grpo_trainer.config.grpo_config import GRPOConfig


def check_arguments(args: Any, processing_class: Any) -> None:
    """Raise ValueError unless they are a configuration of this trainer, and a tokenizer or None."""
    if not isinstance(args, GRPOConfig):
        expected = f"{GRPOConfig.__module__.partition('.')[0]}.{GRPOConfig.__qualname__}"
        raise ValueError(f"args: expected a {expected}, got a {_kind(args)}")
    if processing_class is None or isinstance(processing_class, PreTrainedTokenizerBase):
        return
    advice = ""
    if isinstance(processing_class, ProcessorMixin):
        advice = "; images are not supported, its tokenizer alone is for text"
    raise ValueError(
        f"processing_class: expected a tokenizer, got a {_kind(processing_class)}{advice}"
    )


def _kind(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
