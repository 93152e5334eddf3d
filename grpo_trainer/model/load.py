"""The policy and its tokenizer, loaded by name or taken as given, and where they may run."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_kernels.hf import has_router_loss, keep_head_in_fp32
from grpo_trainer.common import masked_text
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.model.adapters import prepare_adapter, with_adapter


def load_policy(
    model: str | PreTrainedModel,
    args: GRPOConfig,
    peft_config: Any | None = None,
    quantization_config: Any | None = None,
) -> PreTrainedModel:
    """Return the model, in fp32 unless ``model_init_kwargs`` has a ``dtype``, under its adapter.

    Raises:
        ValueError: there is no such model, options for loading come with an instance, or the
            adapter cannot be trained.
    """
    if isinstance(model, str):
        model = _load(model, args, quantization_config)
    else:
        given = {
            "model_init_kwargs": args.model_init_kwargs,
            "quantization_config": quantization_config,
        }
        for name, value in given.items():
            if value is not None:
                shown = masked_text(repr(value))
                raise ValueError(f"{name}: expected None with a model instance, got {shown}")
    if args.cast_lm_head_to_fp32:
        keep_head_in_fp32(model)
    if peft_config is not None:
        model = with_adapter(model, peft_config)
    prepare_adapter(model, args)
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def _load(name: str, args: GRPOConfig, quantization_config: Any | None) -> PreTrainedModel:
    settings: dict[str, Any] = {"dtype": "float32", "trust_remote_code": args.trust_remote_code}
    own = options("model_init_kwargs", args.model_init_kwargs)
    settings |= own
    if quantization_config is not None:
        if "quantization_config" in settings:
            raise ValueError(
                "quantization_config: expected it once, got it in model_init_kwargs too"
            )
        settings["quantization_config"] = quantization_config
        if torch.cuda.is_available():  # quantised weights are made on their device, and stay there
            settings.setdefault("device_map", {"": args.device})
    try:
        return AutoModelForCausalLM.from_pretrained(name, **settings)
    except (OSError, ValueError, SafetensorError) as error:  # not there, no connection, broken
        raise ValueError(f"model {name!r} cannot be loaded: {error}") from error
    except TypeError as error:  # what from_pretrained does not know goes to the model's __init__
        if not any(repr(key) in str(error) for key in own):
            raise
        raise ValueError(f"model_init_kwargs: expected known names: {error}") from error
    except ImportError as error:  # bitsandbytes, or what else a quantisation needs
        if "quantization_config" not in settings:
            raise
        raise ValueError(f"quantization_config: {error}") from error


def load_tokenizer(model: PreTrainedModel, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to ``model``.

    Raises:
        ValueError: there is none beside it, or one without a vocabulary.
    """
    settings = options("model_init_kwargs", args.model_init_kwargs)
    name = model.config._name_or_path
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            trust_remote_code=args.trust_remote_code,
            revision=settings.get("revision", "main"),
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"processing_class: expected a tokenizer, since that of model {name!r} cannot be "
            f"loaded: {error}"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made of nothing where no file is
        raise ValueError(
            f"processing_class: expected a tokenizer, since there are no files of one in {name!r}"
        )
    return tokenizer


def check_placement(args: GRPOConfig, accelerator: Accelerator) -> None:
    """Raise ValueError unless every process has one device, and a placement that fits ``args``."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {args.n_gpu}; start with `accelerate launch` or "
            "set CUDA_VISIBLE_DEVICES"
        )
    if accelerator.parallelism_config is not None:
        sizes = {
            name: getattr(accelerator.parallelism_config, f"{name}_size", 1)
            for name in ("tp", "cp", "sp")
        }
        wrong = ", ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
        if wrong:
            raise ValueError(
                f"parallelism_config: expected data parallelism alone (each process has whole "
                f"sequences and whole layers), got {wrong}"
            )
    asked = {"fsdp": args.fsdp_plugin_args, "deepspeed": args.deepspeed_plugin}
    for name, plugin in asked.items():
        if plugin is not None and getattr(accelerator.state, f"{name}_plugin", None) is None:
            raise ValueError(
                f"{name}: expected processes that accelerate shards a model over, with a GPU each, "
                f"got {accelerator.distributed_type.value}, where it would have no effect"
            )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if args.cast_lm_head_to_fp32 and sharded and accelerator.mixed_precision != "no":
        raise ValueError(
            "cast_lm_head_to_fp32: expected False under FSDP and DeepSpeed with mixed_precision="
            f"{accelerator.mixed_precision!r}, which compute in that dtype in all layers; got True"
        )


def router_coef(model: PreTrainedModel, args: GRPOConfig) -> float:
    """Return the weight of the router loss: the argument's, else that of the model's config.

    Raises:
        ValueError: a weight is asked for and the model has no such loss.
    """
    wanted = args.router_aux_loss_coef
    if has_router_loss(model):
        own = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        return own if wanted is None else wanted
    if wanted:
        raise ValueError(
            "router_aux_loss_coef: expected None or 0 with a model without a load-balancing loss "
            f"of its routers, got {wanted} for {type(model).__name__}"
        )
    return 0.0
