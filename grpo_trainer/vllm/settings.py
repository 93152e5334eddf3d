"""vLLM's start settings: weights, precision, and room for adapters."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from grpo_kernels.common import hint
from grpo_trainer.config import loss_config
from grpo_trainer.data import looks_local
from grpo_trainer.engines import MAX_LOGPROBS, EngineContext
from grpo_trainer.policy import base_policy, is_quantized

logger = logging.getLogger(__name__)

# Methods with which vLLM quantizes the weights of a full-precision checkpoint. For each update it
# reloads a layer in the checkpoint's dtype and quantizes it again
# (model_loader/reload/layerwise.py). Other methods reload only quantized weights, which the policy
# does not have.
REQUANTIZED = ("fp8_per_tensor", "fp8_per_channel", "fp8_per_block")
# values of init_lora_weights that do not change the base
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")


def engine_settings(context: EngineContext) -> dict[str, Any]:
    """Return the arguments of vllm.LLM, except those that depend on an adapter."""
    args, accelerator = context.args, context.accelerator
    if args.vllm_enable_sleep_mode and accelerator.device.type != "cuda":
        raise ValueError(
            "vllm_enable_sleep_mode: expected False without a GPU, since there is nothing to free"
        )
    computes_in = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    settings = {
        "model": base_policy(context.policy()).config._name_or_path,
        "load_format": "dummy",
        "dtype": computes_in or str(context.policy().dtype).removeprefix("torch."),
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
        "max_model_len": args.vllm_max_model_length,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "enable_sleep_mode": args.vllm_enable_sleep_mode,
        # from the distribution that tokens are sampled from, after temperature and filters
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        "generation_config": "vllm",  # ignore the model's own sampling settings
        "disable_log_stats": True,
    }
    if args.use_rollout_routing_replay:
        settings["enable_return_routed_experts"] = True
    if accelerator.num_processes > 1:
        settings["distributed_executor_backend"] = "external_launcher"
    return settings


def check_engine_options(names: Iterable[str]) -> None:
    """Raise ValueError unless all of ``names`` are arguments of ``vllm.LLM``."""
    from vllm import LLM, EngineArgs

    known = inspect.signature(LLM).parameters.keys() | {each.name for each in fields(EngineArgs)}
    for name in names:
        if name not in known:
            raise ValueError(
                f"vllm_engine_kwargs: expected arguments of vllm.LLM, got {name!r}"
                f"{hint(name, known)}"
            )


def engine_ranks(context: EngineContext, settings: dict[str, Any]) -> Sequence[int] | str:
    """Return the ranks that vLLM can reserve room for, or why it cannot apply an adapter."""
    from vllm.config.lora import MaxLoRARanks
    from vllm.model_executor.models import ModelRegistry, supports_lora

    if settings.get("enable_lora") is False:
        return "vllm_engine_kwargs has enable_lora=False"
    if settings.get("lora_target_modules"):
        return "vllm_engine_kwargs has lora_target_modules, which excludes other layers"
    if settings["dtype"] == "float32" and context.accelerator.device.type == "cuda":
        return (
            "vLLM computes in float32, and its LoRA kernels for GPUs in 16 bits: set bf16, or "
            "vllm_engine_kwargs={'dtype': 'bfloat16'}"
        )
    kind = type(base_policy(context.policy())).__name__
    model = ModelRegistry.models.get(kind)
    if model is not None and not supports_lora(model.load_model_cls()):
        return f"vLLM's implementation of {kind} does not support adapters"
    return (settings["max_lora_rank"],) if "max_lora_rank" in settings else get_args(MaxLoRARanks)


def server_ranks(server: dict[str, Any]) -> Sequence[int] | str:
    """Return the ranks of a server from its configuration, or why it cannot apply an adapter."""
    lora = server["lora_config"]
    if not lora:
        return "the server was started without --enable-lora --max-lora-rank"
    if lora["target_modules"]:
        return "the server was started with --lora-target-modules, which excludes other layers"
    return [lora["max_lora_rank"]]


def check_reports_experts(server: dict[str, Any]) -> None:
    """Raise ValueError unless a server's configuration reports routed experts."""
    reports = server.get("aux_output_config", {})
    if not reports.get("enable_return_routed_experts"):
        raise ValueError(
            "use_rollout_routing_replay: expected a server with vLLM 0.32 or later that reports "
            "routed experts, got a server that was started without --enable-return-routed-experts"
        )


def describe(context: EngineContext, folder: str) -> None:
    """Write a model folder without weights."""
    model = base_policy(context.policy())
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    context.processing_class.save_pretrained(folder)


def quantization_of(engine_options: Mapping[str, Any]) -> str | None:
    """Return vLLM's quantization method in ``vllm_engine_kwargs``; None if there is none."""
    by_layer = engine_options.get("quantization_config") is not None
    return engine_options.get("quantization") or ("online" if by_layer else None)


def loads_base(
    context: EngineContext,
    *,
    takes_adapter: bool,
    quantization: str | None,
    setting: str,
    model: str | None = None,
) -> bool:
    """Return whether vLLM loads the base weights itself, and only the adapter is sent.

    Args:
        quantization: of vLLM's weights; None: they have the policy's precision.
        setting: the name of its setting, for errors.
        model: vLLM loads it instead of the policy's base; None: the base.

    Raises:
        ValueError: vLLM would sample with other weights than the policy's.
    """
    policy = context.policy()
    if quantization is not None or is_quantized(policy):
        _warn_without_correction(context)
    if not takes_adapter:
        if model is not None:
            raise ValueError(
                "vllm_engine_kwargs['model']: expected none, since all weights come from the "
                f"policy unless vLLM applies its LoRA adapter, got {model!r}"
            )
        check_requantized(quantization, setting)
        return False
    if model is None and not is_quantized(policy) and quantization in (None, *REQUANTIZED):
        return False  # the policy sends the base, which may have changed since it was loaded
    init = policy.peft_config[policy.active_adapters[0]].init_lora_weights
    if init not in _KEEPS_BASE:
        raise ValueError(
            f"peft_config: expected one of {', '.join(map(repr, _KEEPS_BASE))} for "
            "init_lora_weights, since vLLM loads the base itself, and other values change it; got "
            f"{init!r}"
        )
    return True


def check_requantized(quantization: str | None, setting: str) -> None:
    """Raise ValueError unless vLLM quantizes the weights of updates like the initial ones."""
    if quantization is None or quantization in REQUANTIZED:
        return
    raise ValueError(
        f"{setting}: expected one of {', '.join(REQUANTIZED)} if weights are updated: with these "
        "vLLM quantizes the weights it is sent, while others need a quantized checkpoint; got "
        f"{quantization!r}. A LoRA adapter that vLLM applies works with all methods"
    )


def base_source(context: EngineContext) -> dict[str, Any]:
    """Return the arguments of vllm.LLM for the files that the policy's base was loaded from.

    Raises:
        ValueError: there are no such files.
    """
    policy = context.policy()
    name = base_policy(policy).config._name_or_path
    if not name or (looks_local(name) and not Path(name).is_dir()):
        raise ValueError(
            "model: expected a model that was loaded from a folder or the hub, from which vLLM can "
            f"load the base itself, got {name!r}; set vllm_engine_kwargs={{'model': "
            "...}, to a folder or hub id with the same weights"
        )
    return {"model": name, "revision": policy.peft_config[policy.active_adapters[0]].revision}


def _warn_without_correction(context: EngineContext) -> None:
    loss = loss_config(context.args)
    if loss.correction_mode is None and not loss.bypasses:
        logger.warning(
            "vllm_importance_sampling_correction: off, although the weights of policy and vLLM are "
            "rounded differently; set it to True to correct the loss for this"
        )
