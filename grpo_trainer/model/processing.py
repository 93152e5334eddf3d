"""The tokenizer or processor that belongs to a policy."""

from __future__ import annotations

import torch
from PIL import Image
from torch import nn
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)

from grpo_kernels.tools import hub_or_cache
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import ProcessingClass, tokenizer_of
from grpo_trainer.model.adapters import base_policy
from grpo_trainer.model.forward import evaluating

_SIDE = 64  # pixels of an image that is tried
# what models raise for what another one takes
_MISMATCH = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def load_processing_class(model: PreTrainedModel, args: GRPOConfig) -> ProcessingClass:
    """Load the tokenizer that belongs to ``model``, or the processor of one that takes images.

    Raises:
        ValueError: there is none beside it, or one without a vocabulary.
    """
    settings = options("model_init_kwargs", args.model_init_kwargs)
    name = model.config._name_or_path
    kind = AutoProcessor if takes_images(model) else AutoTokenizer
    try:
        with hub_or_cache(name):
            found = kind.from_pretrained(
                name,
                trust_remote_code=args.trust_remote_code,
                revision=settings.get("revision", "main"),
            )
    except (ImportError, OSError, ValueError) as error:  # Qwen's processors import torchvision
        raise ValueError(
            f"processing_class: expected a tokenizer or a processor, since that of model {name!r} "
            f"cannot be loaded: {error}"
        ) from error
    tokenizer = tokenizer_of(found)
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made of nothing where no file is
        raise ValueError(
            f"processing_class: expected a tokenizer, since there are no files of one in {name!r}"
        )
    return found


def check_processor(processing_class: ProcessingClass, model: PreTrainedModel) -> None:
    """Raise ValueError if a processor is not one of ``model``."""
    if not isinstance(processing_class, ProcessorMixin):
        return
    kind = type(processing_class).__name__
    if not isinstance(getattr(processing_class, "tokenizer", None), PreTrainedTokenizerBase):
        raise ValueError(f"processing_class: expected a processor with a tokenizer, got a {kind}")
    policy = base_policy(model)
    wanted = getattr(policy.config, "image_token_id", None)
    own = getattr(processing_class, "image_token_ids", [])
    if not takes_images(model) or (wanted is not None and own and wanted not in own):
        raise ValueError(
            f"processing_class: expected the processor of {type(policy).__name__}, in which token "
            f"{wanted} stands for images, got a {kind} with {own}"
        )


def check_images_run(
    processing_class: ProcessingClass, runs: nn.Module, device: torch.device
) -> None:
    """Raise ValueError unless the policy can take what a processor makes of an image.

    ``runs`` is what is called to run the policy, once it is placed.
    """
    if not isinstance(processing_class, ProcessorMixin):
        return
    image = Image.new("RGB", (_SIDE, _SIDE))
    text = processing_class.image_token
    made = processing_class(text=[text], images=[[image]], return_tensors="pt").to(device)
    try:
        with evaluating(runs):
            runs(**made, use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except _MISMATCH as error:
        raise ValueError(
            f"processing_class: expected the processor of the policy, got a "
            f"{type(processing_class).__name__}, with whose images it fails: {error}"
        ) from error


def takes_images(model: PreTrainedModel) -> bool:
    """Return whether ``model`` has a part for images."""
    return getattr(base_policy(model).config, "vision_config", None) is not None
