"""The command line's arguments for LoRA and quantisation, under the names that TRL gives them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.hf_argparser import HfArg
from transformers.utils import is_bitsandbytes_available, is_peft_available

from grpo_trainer.config import GRPOConfig, options


@dataclass
class AdapterArguments:
    """What is trained of the model, and how the rest is stored.

    Raises:
        ValueError: an argument has no effect without another one, or a package is missing.
    """

    use_peft: bool = HfArg(default=False, help="Train a LoRA adapter in place of the whole model.")
    lora_r: int = HfArg(default=16, help="Rank of the adapter.")
    lora_alpha: int = HfArg(default=32, help="The update is scaled by lora_alpha / lora_r.")
    lora_dropout: float = HfArg(
        default=0.05, help="Dropout on the adapter's input; 0 with one on the LM head."
    )
    lora_target_modules: list[str] | None = HfArg(
        default=None, help="Names of adapted layers, or all-linear. Default: what peft has for it."
    )
    lora_target_parameters: list[str] | None = HfArg(
        default=None, help="Names of adapted parameters, such as those of experts."
    )
    lora_modules_to_save: list[str] | None = HfArg(
        default=None, help="Layers that are trained and saved as a whole."
    )
    lora_task_type: str = HfArg(default="CAUSAL_LM", help="The adapter's task for peft.")
    use_rslora: bool = HfArg(default=False, help="Scale by lora_alpha / sqrt(lora_r) instead.")
    use_dora: bool = HfArg(default=False, help="Train magnitudes apart from directions (DoRA).")
    load_in_8bit: bool = HfArg(
        default=False, help="Keep the frozen weights in 8 bits; needs use_peft."
    )
    load_in_4bit: bool = HfArg(
        default=False, help="Keep the frozen weights in 4 bits; needs use_peft."
    )
    bnb_4bit_quant_type: str = HfArg(default="nf4", help="Number format of 4 bits: nf4 or fp4.")
    use_bnb_nested_quant: bool = HfArg(
        default=False, help="Quantise the scales of 4-bit weights too."
    )
    bnb_4bit_quant_storage: str | None = HfArg(
        default=None, help="Dtype in which 4-bit weights are stored. Default: uint8."
    )

    def __post_init__(self) -> None:
        if not self.use_peft:
            needs_peft = ("lora_", "use_rslora", "use_dora", "load_in_")
            self._refuse([name for name in self._set() if name.startswith(needs_peft)], "use_peft")
        if not self.load_in_4bit:
            self._refuse([name for name in self._set() if "bnb_" in name], "load_in_4bit")
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("load_in_8bit, load_in_4bit: expected at most one of them, got both")
        if self.bnb_4bit_quant_type not in ("nf4", "fp4"):
            raise ValueError(
                f"bnb_4bit_quant_type: expected nf4 or fp4, got {self.bnb_4bit_quant_type!r}"
            )
        if self.use_peft and not is_peft_available():
            raise ValueError("use_peft: expected the package peft to be installed; install [peft]")
        if (self.load_in_4bit or self.load_in_8bit) and not is_bitsandbytes_available():
            raise ValueError(
                "load_in_4bit, load_in_8bit: expected the package bitsandbytes to be installed"
            )

    def peft_config(self) -> Any | None:
        """Return the adapter's configuration; None without ``use_peft``."""
        if not self.use_peft:
            return None
        from peft import LoraConfig

        modules: Any = self.lora_target_modules
        if modules is not None and len(modules) == 1:
            [modules] = modules  # "all-linear" is a name of peft's only outside a list
        return LoraConfig(
            task_type=self.lora_task_type,
            r=self.lora_r,
            lora_alpha=self.lora_alpha,
            lora_dropout=self.lora_dropout,
            target_modules=modules,
            target_parameters=self.lora_target_parameters,
            modules_to_save=self.lora_modules_to_save,
            use_rslora=self.use_rslora,
            use_dora=self.use_dora,
        )

    def quantization_config(self, args: GRPOConfig) -> BitsAndBytesConfig | None:
        """Return how the base model is quantised; None if it is not.

        4-bit weights are multiplied in the dtype of all layers: bf16 with ``args.bf16``, else the
        model's.
        """
        if self.load_in_8bit:
            return BitsAndBytesConfig(load_in_8bit=True)
        if not self.load_in_4bit:
            return None
        dtype = options("model_init_kwargs", args.model_init_kwargs).get("dtype", "float32")
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype="bfloat16" if args.bf16 else dtype,
            bnb_4bit_quant_type=self.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=self.use_bnb_nested_quant,
            bnb_4bit_quant_storage=self.bnb_4bit_quant_storage,
        )

    def _set(self) -> list[str]:
        """Return which arguments of this class differ from their defaults."""
        own = fields(AdapterArguments)
        return [item.name for item in own if getattr(self, item.name) != item.default]

    def _refuse(self, names: list[str], needed: str) -> None:
        if names:
            raise ValueError(f"{', '.join(names)}: expected {needed} with it, got {needed}=False")
