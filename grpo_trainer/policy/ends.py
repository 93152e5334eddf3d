"""Adapters on a model's two ends, its embeddings and its head: tied ends, and new tokens."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from grpo_kernels.hf import runs_in_fp32
from grpo_trainer.config import GRPOConfig
from grpo_trainer.policy.placement import Placement


def check_ends(policy: Any, args: GRPOConfig) -> None:
    """Raise ValueError for an adapter of embeddings or head that would not train as its config
    says.

    PEFT ties LoRA factors only by memory: they are two parameters, get two Adam updates, and
    separate when the model moves to a GPU. Its tied copy of a head has no bias.
    """
    base = policy.get_base_model()
    [adapter] = policy.active_adapters
    head, config = base.get_output_embeddings(), policy.peft_config[adapter]
    if head is None:  # the fused head raises the error
        return
    tied = ties_ends(base)
    ensured = tied and getattr(config, "ensure_weight_tying", False)
    if ensured and adapter in getattr(head, "lora_A", {}):
        raise ValueError(
            "peft_config: expected modules_to_save or trainable_token_indices with "
            "ensure_weight_tying=True, got LoRA on embeddings and head, which PEFT trains "
            "separately; remove both from target_modules"
        )
    copied = adapter in getattr(head, "modules_to_save", {})
    if ensured and copied and getattr(head.original_module, "bias", None) is not None:
        raise ValueError(
            "peft_config: expected a head without a bias with ensure_weight_tying=True, which "
            "drops it; use trainable_token_indices={'embed_tokens': [...]}, or no "
            "modules_to_save for the head"
        )
    if args.cast_lm_head_to_fp32 and not runs_in_fp32(base):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False with an adapter that replaces the head "
            "(trainable_token_indices, ensure_weight_tying), got True"
        )


def check_shards(policy: Any, placement: Placement, accelerator: Accelerator) -> None:
    """Raise ValueError for adapters on embeddings and head that cannot be sharded.

    accelerate shards the ends separately if it does not see that they are tied, and an adapter of
    single tokens hides that. And it cannot tie weights again through PEFT's wrappers, as
    ``cpu_ram_efficient_loading`` requires.
    """
    if not placement.sharded or not is_peft_model(policy):
        return
    base, config = policy.get_base_model(), policy.peft_config[policy.active_adapters[0]]
    tied = ties_ends(base)
    ids = getattr(config, "trainable_token_indices", None)
    _check_rows(ids, zero3=placement.name == "ZeRO-3")
    if ids and tied:
        raise ValueError(
            "peft_config: expected no trainable_token_indices with FSDP2 and tied embeddings, got "
            f"{ids}; set modules_to_save=['embed_tokens'] with ensure_weight_tying=True"
        )
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    replaced = hasattr(base.get_output_embeddings(), "modules_to_save")
    if tied and replaced and getattr(plugin, "cpu_ram_efficient_loading", False):
        raise ValueError(
            "cpu_ram_efficient_loading: expected False with modules_to_save and tied embeddings, "
            "got True; set fsdp_cpu_ram_efficient_loading: false in the file for `accelerate "
            "launch`, or cpu_ram_efficient_loading in fsdp_config"
        )


def check_tokens(model: PreTrainedModel, peft_config: Any) -> None:
    """Raise ValueError unless the model has a row for each individually trained token."""
    indices = getattr(peft_config, "trainable_token_indices", None)
    _check_rows(indices, zero3=is_deepspeed_zero3_enabled())
    for ids in _trained_tokens(indices):
        rows = model.get_input_embeddings().num_embeddings
        if len(set(ids)) < len(ids) or not all(0 <= token < rows for token in ids):
            raise ValueError(
                f"trainable_token_indices: expected distinct ids below {rows}, the rows of the "
                f"embeddings, got {ids}; for new tokens call model.resize_token_embeddings first"
            )


def _check_rows(indices: Any, *, zero3: bool) -> None:
    """Raise ValueError if weights are sharded so that PEFT cannot read their rows."""
    if indices and zero3:
        raise ValueError(
            "peft_config: expected no trainable_token_indices with ZeRO-3, whose shards have no "
            f"rows to replace, got {indices}; use ZeRO-2"
        )


def make_room(
    model: PreTrainedModel,
    weights: Mapping[str, Tensor],  # from an adapter's file
    config: Mapping[str, Any],  # of the adapter
) -> None:
    """Resize the embeddings of ``model`` to the number of rows that an adapter was saved with.

    PEFT stores the embeddings in the adapter's file if their size differs from the base model's.

    Raises:
        ValueError: the adapter trains tokens that have no row.
    """
    indices = config.get("trainable_token_indices")
    _check_rows(indices, zero3=is_deepspeed_zero3_enabled())
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    saved = [
        len(value)
        for key, value in weights.items()
        if key.startswith(f"base_model.model.{name}.") and key.endswith("weight")
    ]
    rows = max(saved, default=embeddings.num_embeddings)
    last = max(chain(*_trained_tokens(indices)), default=-1)
    if last >= rows:
        raise ValueError(
            f"expected a base model with a row for token {last}, which the adapter trains, got "
            f"{rows} rows; save the base model after resize_token_embeddings, and set its folder "
            "as base_model_name_or_path in adapter_config.json"
        )
    if rows != embeddings.num_embeddings:
        model.resize_token_embeddings(rows, mean_resizing=False)


def ties_ends(model: PreTrainedModel) -> bool:
    """Return whether embeddings and head are one weight.

    transformers and PEFT read the config of the whole model. The text part's config may differ, or
    lack the setting.
    """
    return bool(getattr(model.config, "tie_word_embeddings", False))


def stay_tied(embeddings: Any, head: Any, adapter: str) -> bool:
    """Return whether tied ends of a model are still one weight under the adapter."""
    copies = [getattr(end, "modules_to_save", {}) for end in (embeddings, head)]
    if all(adapter in each for each in copies):
        return copies[0][adapter].weight is copies[1][adapter].weight
    first, second = (getattr(end, "token_adapter", end) for end in (embeddings, head))
    return getattr(second, "tied_adapter", None) is first


def _trained_tokens(indices: list[int] | dict[str, list[int]] | None) -> list[list[int]]:
    """Return the ids of each layer, from PEFT's ``trainable_token_indices``."""
    if isinstance(indices, dict):
        return list(indices.values())
    return [indices] if indices else []
