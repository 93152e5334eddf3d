"""Names that fields of GRPOConfig had before: accepted with a warning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig


def _old(text: str) -> Any:
    return field(default=None, metadata={"help": f"Deprecated: {text}"})


@dataclass
class OldNames:
    """Deprecated fields; None means not set, and each is None after construction."""

    wandb_log_unique_prompts: bool | None = _old("use log_unique_prompts.")
    use_liger_loss: bool | None = _old("the loss is always fused, drop it.")
    vllm_guided_decoding_regex: str | None = _old("use vllm_structured_outputs_regex.")
    vllm_importance_sampling_cap: float | None = _old("use vllm_importance_sampling_clip_max.")


_NEW_NAMES = {
    "wandb_log_unique_prompts": "log_unique_prompts",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def adopt_old_names(args: GRPOConfig) -> None:
    """Moves deprecated values to the fields that took their place.

    Raises:
        ValueError: an old and its new name are both set, to different values.
    """
    for item in fields(OldNames):
        value, new = getattr(args, item.name), _NEW_NAMES.get(item.name)
        if value is None:
            continue
        _warn(f"{item.name}: {item.metadata['help']}")
        setattr(args, item.name, None)
        if new is None:
            continue
        default = type(args).__dataclass_fields__[new].default
        if getattr(args, new) not in (default, value):
            raise ValueError(
                f"{item.name}, {new}: expected one of them (they are the same), "
                f"got {value!r} and {getattr(args, new)!r}"
            )
        setattr(args, new, value)
    if args.top_k is None:
        _warn("top_k: Deprecated: use 0 for None.")
        args.top_k = 0


def _warn(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=5)
