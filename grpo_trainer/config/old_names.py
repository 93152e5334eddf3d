"""Names that fields of GRPOConfig had before: accepted with a warning."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

from transformers import TrainingArguments

from grpo_trainer.config.checks import FLAG, dtype_name, setting


def _old(text: str, **metadata: Any) -> Any:
    return setting(None, f"Deprecated: {text}", **metadata)


@dataclass
class OldNames:
    """Deprecated fields; None means not set, and each is None after construction."""

    wandb_log_unique_prompts: bool | None = _old("use log_unique_prompts.", **FLAG)
    use_liger_loss: bool | None = _old("the loss is always fused, drop it.", **FLAG)
    use_transformers_paged: bool | None = _old("use use_transformers_continuous_batching.", **FLAG)
    vllm_guided_decoding_regex: str | None = _old("use vllm_structured_outputs_regex.")
    vllm_importance_sampling_cap: float | None = _old("use vllm_importance_sampling_clip_max.")


_NEW_NAMES = {
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def adopt_old_names(args: TrainingArguments) -> None:
    """Move deprecated values to the fields that took their place.

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
    _adopt_torch_dtype(args)
    if args.top_k is None:
        _warn("top_k: Deprecated: use 0 for None.")
        args.top_k = 0


def _adopt_torch_dtype(args: TrainingArguments) -> None:
    """Adopt transformers' old name, which ``from_pretrained`` would ignore beside ``dtype``."""
    given = args.model_init_kwargs
    if not isinstance(given, dict) or "torch_dtype" not in given:
        return
    _warn("model_init_kwargs['torch_dtype']: Deprecated: use dtype.", 6)
    kept = {name: value for name, value in given.items() if name != "torch_dtype"}
    dtype = kept.setdefault("dtype", given["torch_dtype"])
    if dtype_name(dtype) != dtype_name(given["torch_dtype"]):
        raise ValueError(
            "model_init_kwargs: expected one of dtype and torch_dtype (they are the same), got "
            f"{dtype!r} and {given['torch_dtype']!r}"
        )
    args.model_init_kwargs = kept


def _warn(message: str, stacklevel: int = 5) -> None:
    warnings.warn(message, FutureWarning, stacklevel=stacklevel)
