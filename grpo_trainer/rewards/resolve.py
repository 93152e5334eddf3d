"""Turn what the user passes into reward functions: callables, names, one-label classifiers."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from grpo_trainer.common import hint, load_function
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.policy import load_pretrained, loading_whole
from grpo_trainer.rewards import builtin
from grpo_trainer.rewards.builtin import BUILTIN_REWARDS, content_of
from grpo_trainer.rewards.call import RewardFunction

RewardSource: TypeAlias = str | nn.Module | Callable[..., Any]
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None


def resolve_rewards(
    sources: RewardSource | Sequence[RewardSource],
    processing_classes: Tokenizers = None,
    args: GRPOConfig | None = None,
) -> list[RewardFunction]:
    """Return reward functions from callables, reward models and names.

    A name is one of :data:`BUILTIN_REWARDS`, an import path ``package.module.function``, or a
    reward model: a folder, or a hub id ``owner/name``. With settings in parentheses, as in
    ``get_cosine_scaled_reward(max_len=512)``, the function is called with them and returns the
    reward function. Functions with the same name get numbers in the log: ``name``, ``name_2``.

    Args:
        sources: one, or a list.
        processing_classes: tokenizers of reward models, one per source (None: the model's own, or
            the source is not a model).
        args: the device and the batch size for reward models.

    Raises:
        ValueError: there is no source, a name is unknown or not a callable, a reward model has
            more than one label, or tokenizers and sources differ in number.
        ImportError: a package that a built-in reward needs is not installed.
    """
    if isinstance(sources, str) or callable(sources):
        sources = [sources]
    if not sources:
        raise ValueError("reward_funcs: expected at least one reward function, got none")
    tokenizers = processing_classes
    if not isinstance(tokenizers, list | tuple):  # one tokenizer, or None
        tokenizers = [tokenizers] * (len(sources) if tokenizers is None else 1)
    if len(tokenizers) != len(sources):
        raise ValueError(
            f"reward_processing_classes: expected {len(sources)}, one per reward function, "
            f"got {len(tokenizers)}"
        )
    args = args if args is not None else GRPOConfig()
    rewards: dict[str, RewardFunction] = {}
    for source, tokenizer in zip(sources, tokenizers, strict=True):
        function = _resolve(source, tokenizer, args)
        inner = _inner(function)
        name = getattr(inner, "__name__", type(inner).__name__)
        if name in rewards:
            numbered = (f"{name}_{number}" for number in itertools.count(2))
            name = next(candidate for candidate in numbered if candidate not in rewards)
        # an object is asynchronous if its class defines `async def __call__`
        is_async = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
        rewards[name] = RewardFunction(name, function, is_async)
    return list(rewards.values())


def _resolve(
    source: RewardSource, tokenizer: PreTrainedTokenizerBase | None, args: GRPOConfig
) -> Callable[..., Any]:
    revision = None
    if isinstance(source, str):
        if source.endswith(")") or not ("/" in source or (Path(source) / "config.json").is_file()):
            source = _by_name(source)
        else:
            source, revision = _load_model(source, args)
    if isinstance(source, nn.Module):
        return RewardModel(source, tokenizer or _load_tokenizer(source, args, revision), args)
    if not callable(source):
        raise ValueError(
            f"reward_funcs: expected callables, models or names, got {type(source).__name__}"
        )
    if _inner(source) in (builtin.accuracy_reward, builtin.reasoning_accuracy_reward):
        builtin.require_math_verify()
    return source


def _by_name(text: str) -> Callable[..., Any]:
    """Return the named function, or its result for the settings in parentheses."""
    path, settings = text, None
    if text.endswith(")"):
        path, settings = _parsed(text)
    if path in BUILTIN_REWARDS:
        function = BUILTIN_REWARDS[path]
    elif "." in path:
        function = load_function(path, "reward_funcs")
    else:
        raise ValueError(
            f"reward_funcs: expected a built-in ({', '.join(sorted(BUILTIN_REWARDS))}), an import "
            "path package.module.function or a reward model (a folder or owner/name), got "
            f"{path!r}{hint(path, BUILTIN_REWARDS)}"
        )
    if settings is None and not path.startswith("get_"):
        return function
    settings = settings or {}
    try:
        inspect.signature(function).bind(**settings)
    except TypeError as error:
        raise ValueError(
            f"reward_funcs: expected settings of {path}{inspect.signature(function)}, "
            f"got {text!r}: {error}"
        ) from error
    return function(**settings)


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    """Return name and settings of ``name(key=value, ...)``, with Python literals as values."""
    try:
        call: Any = ast.parse(text, mode="eval").body
        settings = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        if call.args:
            raise ValueError("expected a name for each value")
    except (AttributeError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"reward_funcs: expected name(key=value, ...) with Python literals, got {text!r}"
        ) from error
    return ast.unparse(call.func), settings


def _inner(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function


class RewardModel:
    """Scores ``prompt + completion`` with the single logit of a classifier.

    Args:
        model: the classifier. It is moved to the device of ``args``, frozen, and set to evaluation.
        tokenizer: the classifier's tokenizer, with its own chat template for message prompts.
        args: give the device, the batch size (as in training) and the template's arguments.

    Raises:
        ValueError: the classifier does not have exactly one label, or the tokenizer cannot pad.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, args: GRPOConfig
    ) -> None:
        config = getattr(model, "config", None)
        source = getattr(config, "_name_or_path", "")
        self.__name__ = Path(source).name or type(model).__name__  # the name in logs
        labels = getattr(config, "num_labels", 1)
        if labels != 1:
            raise ValueError(
                f"reward_funcs: expected a reward model with 1 label, got {self.__name__!r} with "
                f"{labels}"
            )
        if tokenizer.pad_token_id is None:
            if tokenizer.eos_token_id is None:
                raise ValueError(
                    "reward_processing_classes: expected a pad_token or an eos_token for "
                    f"{self.__name__!r}, got neither"
                )
            tokenizer.pad_token = tokenizer.eos_token
        if config is not None:  # classifiers read the reward from the last unpadded token
            config.get_text_config().pad_token_id = tokenizer.pad_token_id
        if not hasattr(model, "hf_device_map"):  # else the model is already placed
            model.to(args.device)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._args = args

    def __call__(self, prompts: list[Any], completions: list[Any], **kwargs: Any) -> Tensor:
        """Return rewards (n,), computed in batches, each padded to its longest text."""
        texts = [self._text(*pair) for pair in zip(prompts, completions, strict=True)]
        size = self._args.per_device_train_batch_size
        parts = [texts[start : start + size] for start in range(0, len(texts), size)]
        return torch.cat([self._score(part) for part in parts])

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + completion
        # reward models see no images
        messages = [one | {"content": content_of(one)} for one in (*prompt, *completion)]
        template = options("chat_template_kwargs", self._args.chat_template_kwargs)
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, **template)
        assert isinstance(text, str)  # because of tokenize=False
        return text

    @torch.inference_mode()
    def _score(self, texts: list[str]) -> Tensor:
        inputs = self.tokenizer(
            texts, padding=True, padding_side="right", add_special_tokens=False, return_tensors="pt"
        ).to(self._args.device)
        used = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        logits = self.model(**used).logits
        if logits.shape != (len(texts), 1):
            raise ValueError(
                f"expected logits of shape {(len(texts), 1)}, got {tuple(logits.shape)}"
            )
        return logits[:, 0].float()


def _load_model(name: str, args: GRPOConfig) -> tuple[nn.Module, str | None]:
    """Return the classifier ``name`` (a folder or hub id), and its revision.

    It is loaded with ``model_init_kwargs``, by default in the checkpoint's dtype. Warns if the
    head is untrained, as in a base or language model.
    """
    settings = {"dtype": "auto"} | options("model_init_kwargs", args.model_init_kwargs)
    with loading_whole():
        model, loading_info = load_pretrained(
            AutoModelForSequenceClassification,
            name,
            f"reward_funcs: model {name!r}",
            args,
            settings,
            num_labels=1,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    for _, shape, _ in loading_info["mismatched_keys"]:  # the head's weights
        model.config.num_labels = shape[0]  # so that RewardModel raises an error
    if loading_info["missing_keys"]:
        missing = ", ".join(sorted(loading_info["missing_keys"]))
        warnings.warn(
            f"reward_funcs: expected a trained reward model, got {name!r} without weights for "
            f"{missing}: they are random, and so are the rewards",
            stacklevel=2,
        )
    return model, settings.get("revision")


def _load_tokenizer(
    model: nn.Module, args: GRPOConfig, revision: str | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer from the checkpoint that ``model`` was loaded from."""
    source = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not source:
        raise ValueError(
            "reward_processing_classes: expected a tokenizer for the reward model "
            f"{type(model).__name__!r}, which was not loaded by name; got None"
        )
    what = f"reward_processing_classes: the tokenizer of {source!r}"
    return load_pretrained(AutoTokenizer, source, what, args, {}, revision=revision or "main")
