"""The policy and its tokenizer, loaded by name or taken as given."""

from __future__ import annotations

from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_trainer.config import GRPOConfig, options


def load_policy(model: str | PreTrainedModel, args: GRPOConfig) -> PreTrainedModel:
    """The model, in fp32 unless ``model_init_kwargs`` has a ``dtype``.

    Raises:
        ValueError: there is no such model, or ``model_init_kwargs`` comes with an instance.
    """
    if isinstance(model, str):
        defaults = {"dtype": "float32", "trust_remote_code": args.trust_remote_code}
        settings = defaults | options("model_init_kwargs", args.model_init_kwargs)
        try:
            model = AutoModelForCausalLM.from_pretrained(model, **settings)
        except OSError as error:  # no such folder or hub id, no connection, no weights
            raise ValueError(f"model {model!r} cannot be loaded: {error}") from error
    elif args.model_init_kwargs is not None:
        raise ValueError(
            "model_init_kwargs: expected None with a model instance, "
            f"got {args.model_init_kwargs!r}"
        )
    if args.disable_dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    return model


def load_tokenizer(model: PreTrainedModel, args: GRPOConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to ``model``."""
    settings = options("model_init_kwargs", args.model_init_kwargs)
    return AutoTokenizer.from_pretrained(
        model.config._name_or_path,
        trust_remote_code=args.trust_remote_code,
        revision=settings.get("revision", "main"),
    )
