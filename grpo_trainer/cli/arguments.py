"""Command-line arguments under TRL's names: datasets, models, adapters."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, fields
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available, is_peft_available

from grpo_kernels.common import check_name, check_number
from grpo_kernels.tools import install_command
from grpo_trainer.common import load_module, setting
from grpo_trainer.config import GRPOConfig, options

_STORAGES = ("bfloat16", "float16", "float32", "float64", "int8", "uint8")  # of bitsandbytes


@dataclass
class ScriptArguments:
    """The dataset of a script."""

    dataset_name: str | None = setting(
        None, "Prompts: a .jsonl, .json, .csv or .parquet file, a folder or a hub id."
    )
    dataset_config: str | None = setting(None, "Configuration of a hub dataset.")
    dataset_train_split: str = setting("train", "Training split of a folder or hub dataset.")
    dataset_test_split: str = setting("test", "Evaluation split of a folder or hub dataset.")
    dataset_streaming: bool = setting(False, "Read the dataset while training; needs max_steps.")


@dataclass
class ModelConfig:
    """The model, which part of it is trained, and how the rest is stored.

    Raises:
        ValueError: an argument needs another one, or a package is missing.
    """

    model_name_or_path: str | None = setting(None, "Model folder or hub id.")
    model_revision: str = setting("main", "Branch, tag or commit of a model from the hub.")
    dtype: str | None = setting(
        "float32",
        "Dtype of the weights; auto: the checkpoint's dtype. Adam needs float32.",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    attn_implementation: str | None = setting(
        None, "Attention implementation, such as sdpa or flash_attention_2."
    )
    use_peft: bool = setting(False, "Train a LoRA adapter instead of the whole model.")
    lora_r: int = setting(16, "Rank of the adapter.")
    lora_alpha: int = setting(32, "The update is scaled by lora_alpha / lora_r.")
    lora_dropout: float = setting(
        0.05, "Dropout on the adapter's input; 0 with an adapter on the LM head."
    )
    lora_target_modules: list[str] | None = setting(
        None, "Layers to adapt, by name, or all-linear; None: peft's choice for the model."
    )
    lora_target_parameters: list[str] | None = setting(
        None, "Parameters to adapt, by name, such as expert weights."
    )
    lora_modules_to_save: list[str] | None = setting(None, "Layers to train and save in full.")
    lora_task_type: str = setting("CAUSAL_LM", "Task type of the adapter, as peft names it.")
    use_rslora: bool = setting(False, "Scale by lora_alpha / sqrt(lora_r) instead.")
    use_dora: bool = setting(False, "Train magnitudes and directions separately (DoRA).")
    load_in_8bit: bool = setting(False, "Quantize the frozen weights to 8 bits; needs use_peft.")
    load_in_4bit: bool = setting(False, "Quantize the frozen weights to 4 bits; needs use_peft.")
    bnb_4bit_quant_type: str = setting("nf4", "Number format of 4-bit weights: nf4 or fp4.")
    use_bnb_nested_quant: bool = setting(False, "Quantize the scales of 4-bit weights too.")
    bnb_4bit_quant_storage: str | None = setting(
        None, "Dtype in which 4-bit weights are stored; None: uint8."
    )

    def __post_init__(self) -> None:
        changed = [f.name for f in fields(ModelConfig) if getattr(self, f.name) != f.default]
        needs_peft = ("lora_", "use_rslora", "use_dora", "load_in_")
        for needed, starts in (("use_peft", needs_peft), ("load_in_4bit", ("bnb_", "use_bnb_"))):
            names = [name for name in changed if name.startswith(starts)]
            if names and not getattr(self, needed):
                raise ValueError(
                    f"{', '.join(names)}: expected {needed} with it, got {needed}=False"
                )
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit, load_in_4bit: expected at most one of them, got both")
        check_number("lora_r", self.lora_r, "an integer >= 1", lambda rank: rank >= 1)
        check_name("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4"))
        check_name("bnb_4bit_quant_storage", self.bnb_4bit_quant_storage, (None, *_STORAGES))
        if self.use_peft and not is_peft_available():
            raise ValueError(
                f"use_peft: expected the package peft to be installed; {install_command('peft')}"
            )
        if (self.load_in_4bit or self.load_in_8bit) and not is_bitsandbytes_available():
            name = "load_in_4bit" if self.load_in_4bit else "load_in_8bit"
            raise ValueError(
                f"{name}: expected the package bitsandbytes to be installed; pip install "
                "bitsandbytes"
            )


def loading_options(model_args: ModelConfig) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that differ from its defaults."""
    given = {
        "revision": (model_args.model_revision, "main"),
        "dtype": (model_args.dtype, "float32"),
        "attn_implementation": (model_args.attn_implementation, None),
    }
    return {name: value for name, (value, default) in given.items() if value != default}


def get_peft_config(model_args: ModelConfig) -> Any | None:
    """Return the adapter's configuration; None without ``use_peft``."""
    if not model_args.use_peft:
        return None
    from peft import LoraConfig

    modules: Any = model_args.lora_target_modules
    if modules is not None and len(modules) == 1:
        [modules] = modules  # "all-linear" is a name of peft's only outside a list
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=modules,
        target_parameters=model_args.lora_target_parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(
    model_args: ModelConfig, args: GRPOConfig | None = None
) -> BitsAndBytesConfig | None:
    """Return how the base model is quantized; None if it is not.

    4-bit weights are multiplied in the dtype of all layers: bf16 with ``args.bf16``, else the
    model's dtype.
    """
    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    own = {} if args is None else options("model_init_kwargs", args.model_init_kwargs)
    dtype = own.get("dtype", model_args.dtype)
    in_bf16 = args is not None and args.bf16
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype="bfloat16" if in_bf16 else None if dtype == "auto" else dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )


@dataclass
class RunArguments(ScriptArguments, ModelConfig):
    """Rewards, tools and modules of a run, in addition to its model and its dataset.

    Construct it before GRPOConfig: construction imports ``import_modules``, and GRPOConfig knows
    only the losses that are registered by then.
    """

    reward_funcs: list[str] | None = setting(
        None,
        "Built-in rewards, import paths module.function or reward models; settings in parentheses: "
        "name(key=value, ...).",
    )
    reward_model_name_or_path: str | None = setting(
        None, "A reward model, a folder or a hub id; listed before reward_funcs."
    )
    tools: list[str] | None = setting(None, "Import paths of functions that the model can call.")
    environment_factory: str | None = setting(
        None, "Import path of a class; each completion gets its own instance."
    )
    rollout_func: str | None = setting(
        None, "Import path of a function (prompts, trainer) that returns completions."
    )
    advantages: str | None = setting(
        None,
        "How completions are compared: rloo, reinforce_plus_plus, maxrl, pass_at_K, or the import "
        "path of a function (rewards, weights, group_size, ...).",
    )
    import_modules: list[str] | None = setting(
        None, "Modules to import first, such as ones that register losses for loss_type."
    )
    eval_dataset_name: str | None = setting(
        None, "Prompts for evaluation, as for dataset_name; None: its dataset_test_split."
    )

    def __post_init__(self) -> None:
        if not self.model_name_or_path:
            raise ValueError("--model_name_or_path is required")
        if not self.dataset_name and not self.environment_factory:  # it may provide prompts
            raise ValueError("--dataset_name is required")
        super().__post_init__()
        if os.getcwd() not in sys.path:
            # the user's modules are in the working directory; at the end, so installed modules win
            sys.path.append(os.getcwd())
        for name in self.import_modules or ():
            load_module(name, "--import_modules")

    @property
    def rewards(self) -> list[str]:
        """Reward functions and models, by name."""
        first = self.reward_model_name_or_path
        return ([first] if first else []) + (self.reward_funcs or [])
