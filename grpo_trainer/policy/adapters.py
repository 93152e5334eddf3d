"""PEFT adapters on the policy: put on, checked and loaded.

transformers' ``generate`` runs with the adapter in place. Merged weights would generate faster, but
16-bit ones are rounded, so that the completions would come from another policy than the one that is
trained, and subtracting an update again does not give the old bits back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import is_peft_available

from grpo_kernels.tools import install_command
from grpo_trainer.config import GRPOConfig


def base_policy(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, without PEFT's wrapper around it."""
    return model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]


def with_adapter(model: PreTrainedModel, peft_config: Any) -> PreTrainedModel:
    """Return ``model`` under a new adapter, the only thing that is then trained.

    Raises:
        ValueError: peft is not installed, ``peft_config`` is none of its configs or one that adds
            virtual tokens, or the model has an adapter already.
    """
    if not is_peft_available():
        raise ValueError(
            f"peft_config: expected the package peft to be installed; {install_command('peft')}"
        )
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            "peft_config: expected a peft.PeftConfig such as LoraConfig, "
            f"got {type(peft_config).__name__}"
        )
    if is_peft_model(model):
        raise ValueError(
            "peft_config: expected None with a PeftModel, which has its adapter; to train a new "
            "one, merge the old one first (merge_and_unload)"
        )
    _check_method(peft_config)
    return get_peft_model(model, peft_config)


def with_saved_adapter(model: PreTrainedModel, name: str, where: dict[str, Any]) -> PreTrainedModel:
    """Return ``model`` under the adapter saved as ``name``, which is then trained on.

    ``where`` has arguments of ``from_pretrained`` that say where it is.
    """
    if not is_peft_available():
        raise ValueError(
            f"model: expected the package peft to be installed for the adapter {name!r}; "
            f"{install_command('peft')}"
        )
    from peft import PeftModel

    return PeftModel.from_pretrained(model, name, is_trainable=True, **where)


def prepare_adapter(model: PreTrainedModel, args: GRPOConfig) -> None:
    """Make an adapted or quantised model ready for training; others pass untouched.

    Raises:
        ValueError: nothing of the model can be trained, or its adapter is of a kind that cannot.
    """
    if not is_peft_model(model):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "model: expected a peft.PeftModel, got adapters loaded by transformers; use "
                "peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)"
            )
        if getattr(model, "is_quantized", False):
            raise ValueError("peft_config: expected one with a quantised model, got None")
        return
    for config in model.peft_config.values():
        _check_method(config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model: expected a PeftModel with a trainable adapter, got a frozen one; load it with "
            "is_trainable=True"
        )
    if len(model.active_adapters) != 1:
        raise ValueError(
            f"model: expected one active adapter, got {', '.join(model.active_adapters)}"
        )
    if getattr(base_policy(model), "is_quantized", False):
        for name, parameter in model.named_parameters():
            # DoRA's magnitudes stay in fp32: their updates are smaller than bf16 resolves
            if parameter.requires_grad and "magnitude" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    if args.gradient_checkpointing:
        # the first checkpointed block has no trainable input otherwise, and would pass no gradient
        model.enable_input_require_grads()


def load_adapters(model: PreTrainedModel, checkpoint: Path) -> None:
    """Load every adapter of ``model`` as ``save_pretrained`` left it, in the dtype it has now.

    Raises:
        ValueError: the checkpoint lacks one.
    """
    from peft import load_peft_weights, set_peft_model_state_dict

    for name in model.peft_config:
        folder = checkpoint if name == "default" else checkpoint / name
        if not (folder / "adapter_model.safetensors").is_file():
            raise ValueError(
                f"resume_from_checkpoint: expected adapter {name!r} in {folder}, got none"
            )
        state = load_peft_weights(str(folder), device="cpu")
        set_peft_model_state_dict(model, state, adapter_name=name)


def _check_method(config: Any) -> None:
    if config.is_prompt_learning:
        raise ValueError(
            f"peft_config: expected adapters inside the layers, such as LoRA; {config.peft_type} "
            "adds virtual tokens, which the loss does not align with"
        )
