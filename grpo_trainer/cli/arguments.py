"""Arguments of the command line, under TRL's names: datasets, models, adapters."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.utils import is_bitsandbytes_available, is_peft_available

from grpo_kernels.arguments import check_name
from grpo_kernels.tools import install_command
from grpo_trainer.common import describe_fields, load_module
from grpo_trainer.config import GRPOConfig, options


@dataclass
class ScriptArguments:
    """The dataset of a script."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False


@dataclass
class ModelConfig:
    """The model, what is trained of it, and how the rest is stored.

    Raises:
        ValueError: an argument has no effect without another one, or a package is missing.
    """

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = field(
        default="float32", metadata={"choices": ["auto", "bfloat16", "float16", "float32"]}
    )
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: list[str] | None = None
    lora_target_parameters: list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

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
        check_name("bnb_4bit_quant_type", self.bnb_4bit_quant_type, ("nf4", "fp4"))
        if self.use_peft and not is_peft_available():
            raise ValueError(
                f"use_peft: expected the package peft to be installed; {install_command('peft')}"
            )
        if (self.load_in_4bit or self.load_in_8bit) and not is_bitsandbytes_available():
            raise ValueError(
                "load_in_4bit, load_in_8bit: expected the package bitsandbytes to be installed"
            )


def loading_options(model_args: ModelConfig) -> dict[str, Any]:
    """Return arguments of ``from_pretrained``: those that are not its defaults here."""
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
    """Return how the base model is quantised; None if it is not.

    4-bit weights are multiplied in the dtype of all layers: bf16 with ``args.bf16``, else the
    model's.
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
    """Rewards, tools and modules of a run, beside its model and its dataset.

    Construction imports ``import_modules``, so it comes before that of GRPOConfig, which knows only
    the losses that are registered by then.
    """

    reward_funcs: list[str] | None = None
    reward_model_name_or_path: str | None = None
    tools: list[str] | None = None
    environment_factory: str | None = None
    rollout_func: str | None = None
    advantages: str | None = None
    import_modules: list[str] | None = None
    eval_dataset_name: str | None = None

    def __post_init__(self) -> None:
        if not self.model_name_or_path:
            raise ValueError("--model_name_or_path is required")
        if not self.dataset_name and not self.environment_factory:  # which may have prompts
            raise ValueError("--dataset_name is required")
        super().__post_init__()
        if os.getcwd() not in sys.path:
            # modules beside the user's data; at the end: a file there replaces no installed module
            sys.path.append(os.getcwd())
        for name in self.import_modules or ():
            load_module(name, "--import_modules")

    @property
    def rewards(self) -> list[str]:
        """Reward functions and models, by name."""
        first = self.reward_model_name_or_path
        return ([first] if first else []) + (self.reward_funcs or [])


describe_fields(RunArguments)
