"""From what a user names to reward functions."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_trainer.common import hint, load_function
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.rewards import builtin
from grpo_trainer.rewards.call import RewardFunction
from grpo_trainer.rewards.model import RewardModel, load_reward_model, load_reward_tokenizer

RewardSource: TypeAlias = str | nn.Module | Callable[..., Any]
Tokenizers: TypeAlias = PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None

BUILTIN_REWARDS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        builtin.accuracy_reward,
        builtin.get_cosine_scaled_reward,
        builtin.reasoning_accuracy_reward,
        builtin.get_repetition_penalty_reward,
        builtin.get_soft_overlong_punishment,
        builtin.think_format_reward,
    )
}


def resolve_rewards(
    sources: RewardSource | Sequence[RewardSource],
    processing_classes: Tokenizers = None,
    args: GRPOConfig | None = None,
) -> list[RewardFunction]:
    """Return reward functions from callables, reward models and names.

    A name is one of :data:`BUILTIN_REWARDS`, an import path ``package.module.function``, or a
    reward model: a folder, or a hub id ``owner/name``. With settings in parentheses, as in
    ``get_cosine_scaled_reward(max_len=512)``, the function named is called with them and returns
    the reward function. Two functions of one name are told apart in the log by a number: ``name``,
    ``name_2``.

    Args:
        sources: one, or several.
        processing_classes: tokenizers of reward models, one per source (None where the model's own
            is meant or the source is no model).
        args: where and in which batches reward models run.

    Raises:
        ValueError: there is none, a name is unknown or does not lead to a callable, a reward model
            has more than one label, or tokenizers and sources differ in number.
        ImportError: a package that a built-in reward needs is not installed.
    """
    if isinstance(sources, str) or callable(sources):
        sources = [sources]
    if not sources:
        raise ValueError("reward_funcs: expected at least one reward function, got none")
    tokenizers = processing_classes
    if not isinstance(tokenizers, list | tuple):  # one, or none
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
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        name = next(each for each in itertools.chain([name], numbered) if each not in rewards)
        # an object is asynchronous if its class defines `async def __call__`
        is_async = any(map(inspect.iscoroutinefunction, (inner, type(inner).__call__)))
        rewards[name] = RewardFunction(name, function, is_async)
    return list(rewards.values())


def _resolve(
    source: RewardSource, tokenizer: PreTrainedTokenizerBase | None, args: GRPOConfig
) -> Callable[..., Any]:
    revision = None
    if isinstance(source, str) and _is_model(source):
        source = load_reward_model(source, args)
        revision = options("model_init_kwargs", args.model_init_kwargs).get("revision")
    elif isinstance(source, str):
        source = _by_name(source)
    if isinstance(source, nn.Module):
        tokenizer = tokenizer or load_reward_tokenizer(source, args, revision)
        return RewardModel(source, tokenizer, args)
    if not callable(source):
        raise ValueError(
            f"reward_funcs: expected callables, models or names, got {type(source).__name__}"
        )
    if _inner(source) in (builtin.accuracy_reward, builtin.reasoning_accuracy_reward):
        builtin.require_math_verify()
    return source


def _is_model(name: str) -> bool:
    return not name.endswith(")") and ("/" in name or (Path(name) / "config.json").is_file())


def _by_name(text: str) -> Callable[..., Any]:
    """Return the function named, or what it returns for the settings given in parentheses."""
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
    try:
        inspect.signature(function).bind(**(settings or {}))
    except TypeError as error:
        raise ValueError(
            f"reward_funcs: expected settings as in {path}{inspect.signature(function)}, "
            f"got {text!r}: {error}"
        ) from error
    return function(**(settings or {}))


def _parsed(text: str) -> tuple[str, dict[str, Any] | None]:
    """Return ``name`` or ``name(key=value, ...)`` with Python literals as values."""
    if not text.endswith(")"):
        return text, None
    try:
        call: Any = ast.parse(text, mode="eval").body
        settings = {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}
        if call.args:
            raise ValueError("expected a name for each value")
    except (AttributeError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"reward_funcs: expected name(key=value, ...) with plain values, got {text!r}"
        ) from error
    return ast.unparse(call.func), settings


def _inner(function: Any) -> Any:
    return function.func if isinstance(function, functools.partial) else function
