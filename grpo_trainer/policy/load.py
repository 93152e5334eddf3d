"""Load the policy and its tokenizer or processor, and add and check PEFT adapters.

transformers' ``generate`` runs with the adapter in place. Merged weights would generate faster, but
in 16 bits they are rounded: the completions would not come from the policy that is trained, and
subtracting the update again would not restore the old bits.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate.utils import is_peft_model
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils import find_adapter_config_file, is_peft_available

from grpo_kernels.hf import drop_wrappers, has_moe_aux_loss, keep_head_in_fp32
from grpo_kernels.tools import hub_or_cache, install_command
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import ProcessingClass, tokenizer_of
from grpo_trainer.masking import cut_at_secret
from grpo_trainer.policy.ends import check_ends, check_tokens, make_room
from grpo_trainer.policy.forward import evaluating
from grpo_trainer.policy.routing import check_experts
from grpo_trainer.policy.tiled_mlp import tile_mlps

_SIDE = 64  # pixels of the test image
# errors of models for another model's inputs
MISMATCH = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
# arguments of from_pretrained for the location of a model, and for adapters only
_WHERE = ("revision", "token", "cache_dir", "subfolder", "local_files_only")
_OF_ADAPTER = ("revision", "subfolder")
# missing, no connection, damaged, more than weights, a required package is missing
_UNREADABLE = (OSError, ValueError, SafetensorError, UnpicklingError, ImportError)


@contextmanager
def loading(name: str, what: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Load something pretrained inside, from the hub or else its cache; ValueError if that fails.

    Args:
        name: its folder or hub id.
        what: describes it in error messages.
        settings: arguments of ``from_pretrained``, some from the user.
    """
    try:
        with hub_or_cache(name):
            yield
    except _UNREADABLE as error:
        quantized = isinstance(error, ImportError) and "quantization_config" in settings
        what = f"quantization_config: {what}" if quantized else what
        raise ValueError(f"{what} cannot be loaded: {error}") from error
    except TypeError as error:  # from_pretrained passes unknown names to the model's __init__
        if not any(repr(key) in str(error) for key in settings):
            raise
        raise ValueError(f"model_init_kwargs: expected known names: {error} ({what})") from error


def load_pretrained(
    kind: Any, name: str, what: str, args: GRPOConfig, settings: dict[str, Any], **more: Any
) -> Any:
    """Return ``kind.from_pretrained(name)`` with the settings; errors begin with ``what``."""
    settings = {"trust_remote_code": args.trust_remote_code} | settings
    with loading(name, what, settings):
        return kind.from_pretrained(name, **settings, **more)


def base_policy(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model, without PEFT's wrapper around it."""
    return model.get_base_model() if is_peft_model(model) else model  # type: ignore[operator]


def load_policy(
    model: str | PreTrainedModel,
    args: GRPOConfig,
    peft_config: Any | None = None,
    quantization_config: Any | None = None,
) -> PreTrainedModel:
    """Return the model, in fp32 unless ``model_init_kwargs`` has a ``dtype``, under its adapter.

    A name may refer to a saved adapter, whose training then continues.

    Raises:
        ValueError: the model does not exist, the adapter cannot be trained, or the MLPs cannot be
            tiled.
    """
    revision = None
    if isinstance(model, str):
        routes = args.use_rollout_routing_replay
        model = load_model(model, args, quantization_config, routes=routes)
        revision = options("model_init_kwargs", args.model_init_kwargs).get("revision")
    else:
        settings = {
            "model_init_kwargs": args.model_init_kwargs,
            "quantization_config": quantization_config,
        }
        for name, value in settings.items():
            if value is not None:
                shown = cut_at_secret(repr(value))
                warnings.warn(f"{name}: no effect on a model instance, got {shown}", stacklevel=3)
        _forget_trainer(model)
    if args.cast_lm_head_to_fp32:
        keep_head_in_fp32(model)
    if peft_config is not None:
        model = _with_adapter(model, peft_config, revision)
    prepare_adapter(model, args)
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    tile_mlps(base_policy(model), args.mlp_tile_tokens)
    return model


def _forget_trainer(model: PreTrainedModel) -> None:
    """Remove an earlier trainer's wrapper around the forward, which sets its precision."""
    base = base_policy(model)
    drop_wrappers(base)
    # accelerate's marks: with them it would not wrap the forward in mixed precision again
    vars(model).pop("_is_accelerate_prepared", None)
    if base is not model and vars(model).pop("_original_forward", None) is not None:
        del model.forward  # accelerate's forward, around peft's


def load_model(
    name: str,
    args: GRPOConfig,
    quantization_config: Any | None = None,
    *,
    what: str = "model",
    routes: bool = False,
) -> PreTrainedModel:
    """Return the model, or the adapter on its base, in the policy's dtype; errors begin with
    ``what``. ``routes``: it must be a mixture of experts."""
    settings: dict[str, Any] = {"dtype": "float32", "trust_remote_code": args.trust_remote_code}
    settings |= options("model_init_kwargs", args.model_init_kwargs)
    if quantization_config is not None:
        if "quantization_config" in settings:
            raise ValueError(
                "quantization_config: expected it once, got it in model_init_kwargs too"
            )
        settings["quantization_config"] = quantization_config
        if torch.cuda.is_available():  # quantized weights cannot change their device
            settings.setdefault("device_map", {"": args.device})
    where = {key: settings[key] for key in _WHERE if key in settings}
    with loading(name, f"{what} {name!r}", settings):
        adapter = find_adapter_config_file(name, **where)
        if adapter is None:
            return _pretrained(name, settings, routes)
        _require_peft(what)
        from peft import PeftModel, load_peft_weights

        config = json.loads(Path(adapter).read_text())
        base, revision = config["base_model_name_or_path"], config.get("revision")
        settings = {key: value for key, value in settings.items() if key not in _OF_ADAPTER}
        settings |= {} if revision is None else {"revision": revision}
        with hub_or_cache(base):
            model = _pretrained(base, settings, routes)
        make_room(model, load_peft_weights(name, device="cpu", **where), config)
        return PeftModel.from_pretrained(model, name, is_trainable=True, **where)


def _require_peft(what: str) -> None:
    if not is_peft_available():
        raise ValueError(
            f"{what}: expected the package peft to be installed; {install_command('peft')}"
        )


def _pretrained(name: str, settings: dict[str, Any], routes: bool) -> PreTrainedModel:
    """Load a model of the class in its config; with ``routes`` it must have experts."""
    known = {key: settings[key] for key in (*_WHERE, "trust_remote_code") if key in settings}
    config = settings.get("config") or AutoConfig.from_pretrained(name, **known)
    if routes:
        check_experts(config)
    architectures = config.architectures or [None]
    takes_images = architectures[0] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    kind = AutoModelForImageTextToText if takes_images else AutoModelForCausalLM
    return kind.from_pretrained(name, **settings)


def _with_adapter(
    model: PreTrainedModel, peft_config: Any, revision: str | None
) -> PreTrainedModel:
    """Return ``model`` under a new adapter; only the adapter is then trained.

    The adapter's configuration stores the base, and its ``revision``.
    """
    _require_peft("peft_config")
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            "peft_config: expected a peft.PeftConfig such as LoraConfig, "
            f"got {type(peft_config).__name__}"
        )
    if is_peft_model(model):
        raise ValueError(
            "peft_config: expected None with a PeftModel, which already has an adapter; to train a "
            "new adapter, merge the old one first (merge_and_unload)"
        )
    check_tokens(model, peft_config)
    try:
        return get_peft_model(model, peft_config, revision=revision)
    except (TypeError, ValueError) as error:  # two kinds on one layer; no layer of this name
        raise ValueError(f"peft_config: {error}") from error


def prepare_adapter(model: PreTrainedModel, args: GRPOConfig) -> None:
    """Prepare an adapted or quantized model for training, or raise ValueError if that is
    impossible; other models are unchanged."""
    if not is_peft_model(model):
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError(
                "model: expected a peft.PeftModel, got adapters loaded by transformers; use "
                "peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)"
            )
        if is_quantized(model):
            raise ValueError("peft_config: expected an adapter with a quantized model, got None")
        return
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise ValueError(
                "peft_config: expected adapters inside the layers, such as LoRA; "
                f"{config.peft_type} adds virtual tokens, which the loss does not support"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model: expected a PeftModel with a trainable adapter, got a frozen adapter; load it "
            "with is_trainable=True"
        )
    if len(model.active_adapters) != 1:
        raise ValueError(
            f"model: expected one active adapter, got {', '.join(model.active_adapters)}"
        )
    if any(getattr(module, "merged_adapters", None) for module in model.modules()):
        raise ValueError(
            "model: expected a PeftModel with an unmerged adapter, since a merged adapter is not "
            "trained; call model.unmerge_adapter()"
        )
    check_ends(model, args)
    if is_quantized(model):
        for name, parameter in model.named_parameters():
            # DoRA's magnitudes stay in fp32: their updates are too small for bf16
            if parameter.requires_grad and "magnitude" not in name:
                parameter.data = parameter.data.to(torch.bfloat16)
    if args.gradient_checkpointing:
        # otherwise the first checkpointed block has no trainable input, and passes no gradient
        model.enable_input_require_grads()


def load_processing_class(model: PreTrainedModel, args: GRPOConfig) -> ProcessingClass:
    """Load the tokenizer of ``model``, or its processor if it accepts images."""
    revision = options("model_init_kwargs", args.model_init_kwargs).get("revision") or "main"
    name, kind = model.config._name_or_path, AutoProcessor if takes_images(model) else AutoTokenizer
    what = f"processing_class: expected a tokenizer or a processor, since the one of {name!r}"
    processing_class = load_pretrained(kind, name, what, args, {}, revision=revision)
    tokenizer = tokenizer_of(processing_class)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers made it without files
        raise ValueError(
            "processing_class: expected a tokenizer, since there are no tokenizer files in "
            f"{name!r}"
        )
    return processing_class


def check_processor(processing_class: ProcessingClass, model: PreTrainedModel) -> None:
    """Raise ValueError if a processor does not belong to ``model``."""
    if not isinstance(processing_class, ProcessorMixin):
        return
    kind = type(processing_class).__name__
    if not isinstance(getattr(processing_class, "tokenizer", None), PreTrainedTokenizerBase):
        raise ValueError(f"processing_class: expected a processor with a tokenizer, got a {kind}")
    policy = base_policy(model)
    token = getattr(policy.config, "image_token_id", None)
    own = getattr(processing_class, "image_token_ids", [])
    if not takes_images(model) or (token is not None and own and token not in own):
        raise ValueError(
            f"processing_class: expected the processor of {type(policy).__name__}, with the image "
            f"token {token}, got a {kind} with {own}"
        )


def check_images_run(
    processing_class: ProcessingClass, runs: nn.Module, device: torch.device
) -> None:
    """Raise ValueError unless the policy runs on a processor's output for an image.

    ``runs`` is the module to call, once the policy is placed.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return
    image = Image.new("RGB", (_SIDE, _SIDE))
    text = processing_class.image_token
    inputs = processing_class(text=[text], images=[[image]], return_tensors="pt").to(device)
    try:
        with evaluating(runs):
            runs(**inputs, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except MISMATCH as error:
        raise ValueError(
            f"processing_class: expected the processor of the policy, got a "
            f"{type(processing_class).__name__}, and the policy fails on its images: {error}"
        ) from error


def takes_images(model: PreTrainedModel) -> bool:
    """Return whether ``model`` accepts images."""
    return getattr(base_policy(model).config, "vision_config", None) is not None


def is_quantized(model: nn.Module) -> bool:
    """Return whether the weights of ``model``, or of its adapter's base, are quantized."""
    return bool(getattr(base_policy(model), "is_quantized", False))


def load_saved(model: PreTrainedModel, folder: Path) -> bool:
    """Load a model that ``save_pretrained`` wrote to ``folder`` if Trainer would not; else return
    False.

    Not every version of Trainer loads each adapter in its current dtype. And most families that
    accept images are saved under older names.
    """
    if is_peft_model(model):
        from peft import load_peft_weights, set_peft_model_state_dict

        for name in model.peft_config:
            place = folder if name == "default" else folder / name
            if not (place / "adapter_model.safetensors").is_file():
                raise ValueError(
                    f"resume_from_checkpoint: expected adapter {name!r} in {place}, got none"
                )
            state = load_peft_weights(str(place), device="cpu")
            set_peft_model_state_dict(model, state, adapter_name=name)
        return True
    saved: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, "pt") as file:
            saved.update(file.keys())
    older = not saved <= set(model.state_dict())
    if older:
        model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())
    return older


def router_coef(model: PreTrainedModel, args: GRPOConfig) -> float:
    """Return the weight of the router loss: the argument, else the value in the model's config."""
    coef = args.router_aux_loss_coef
    if has_moe_aux_loss(model):
        own = getattr(model.config.get_text_config(), "router_aux_loss_coef", 0.0)
        return own if coef is None else coef
    if coef:
        raise ValueError(
            "router_aux_loss_coef: expected None or 0 for a model without a load-balancing loss, "
            f"got {coef} for {type(model).__name__}"
        )
    return 0.0
