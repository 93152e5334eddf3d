"""Reward models: sequence classifiers with one label, called like reward functions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.policy import loading, loading_whole


class RewardModel:
    """Scores ``prompt + completion`` by the one logit of a classifier.

    Args:
        model: the classifier. It is put on the device of ``args``, in evaluation mode and frozen.
        tokenizer: the classifier's own, with its own chat template for conversational prompts.
        args: for the device, the batch size (that of a training step) and the template's arguments.

    Raises:
        ValueError: the classifier has not exactly one label, or the tokenizer cannot pad.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
    ) -> None:
        self.__name__ = _model_name(model)  # for logs
        config = getattr(model, "config", None)
        labels = getattr(config, "num_labels", 1)
        if labels != 1:
            raise _wrong_labels(self.__name__, labels)
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    "reward_processing_classes: expected a pad_token or an eos_token for "
                    f"{self.__name__!r}, got neither"
                )
            tokenizer.pad_token = tokenizer.eos_token
        if config is not None:  # classifiers read the reward off the last token that is no padding
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if not hasattr(model, "hf_device_map"):  # such a model is placed already
            model.to(args.device)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._device = args.device
        self._batch_size = args.per_device_train_batch_size
        self._template = options("chat_template_kwargs", args.chat_template_kwargs)

    def __call__(self, prompts: list[Any], completions: list[Any], **kwargs: Any) -> Tensor:
        """Return rewards (n,), computed in batches that are padded to their own longest text."""
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        size = self._batch_size
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        return torch.cat([self._score(part) for part in parts])

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        messages = [_as_text(message) for message in (*prompt, *completion)]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **self._template)
        assert isinstance(text, str)  # with tokenize=False
        return text

    @torch.inference_mode()
    def _score(self, texts: list[str]) -> Tensor:
        inputs = self.tokenizer(
            texts,
            padding=True,
            padding_side="right",
            add_special_tokens=False,
            return_tensors="pt",
        ).to(self._device)
        logits = self.model(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).logits
        if logits.shape != (len(texts), 1):
            raise ValueError(
                f"expected logits of shape {(len(texts), 1)}, got {tuple(logits.shape)}"
            )
        return logits[:, 0].float()


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content is text: a reward model sees no images."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return message | {"content": "".join(part.get("text") or "" for part in content)}


def load_reward_model(name: str, args: GRPOConfig) -> nn.Module:
    """Return the classifier in folder or hub id ``name``, with one label.

    It is loaded as ``model_init_kwargs`` says, in the dtype of its checkpoint if they name none. A
    warning says so if its head is not trained, as that of a base or language model.

    Raises:
        ValueError: it cannot be loaded, or has another number of labels.
    """
    settings = {"dtype": "auto", "trust_remote_code": args.trust_remote_code}
    settings |= options("model_init_kwargs", args.model_init_kwargs)
    wanted = {"num_labels": 1, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with loading_whole(), loading(name, f"reward_funcs: model {name!r}", settings):
        model, found = AutoModelForSequenceClassification.from_pretrained(
            name, **settings, **wanted
        )
    for _, shape, _ in found["mismatched_keys"]:
        raise _wrong_labels(_model_name(model), shape[0])
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"]))
        warnings.warn(
            f"reward_funcs: expected a trained reward model, got {name!r} without weights for "
            f"{missing}, which are random now, and so are its rewards",
            stacklevel=2,
        )
    return model


def load_reward_tokenizer(
    model: nn.Module, args: GRPOConfig, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the checkpoint that ``model`` was loaded from.

    Raises:
        ValueError: there is none.
    """
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not source:
        raise ValueError(
            "reward_processing_classes: expected a tokenizer for the reward model "
            f"{_model_name(model)!r}, which was not loaded by name; got None"
        )
    with loading(source, f"reward_processing_classes: the tokenizer of {source!r}"):
        return AutoTokenizer.from_pretrained(
            source, trust_remote_code=args.trust_remote_code, revision=revision or "main"
        )


def _wrong_labels(name: str, labels: int) -> ValueError:
    return ValueError(
        f"reward_funcs: expected a reward model with 1 label, got {name!r} with {labels}"
    )


def _model_name(model: nn.Module) -> str:
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    return Path(source).name or type(model).__name__
