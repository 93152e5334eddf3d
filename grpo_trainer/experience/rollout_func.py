"""Completions by a function of the user's, checked."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from grpo_kernels.losses import Metrics
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Prompt, Sample, decode_completions, images_of
from grpo_trainer.engines import EngineContext, Sampler

# (prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", "env_mask", others}
RolloutFunction: TypeAlias = Callable[[list[Prompt], Any], Mapping[str, Any]]

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
# what reward functions are given anyway
_TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


def check_rollout_func(function: Any, args: GRPOConfig, several_turns: bool) -> None:
    """Raise ValueError unless it can make the completions.

    Args:
        function: what was given as ``rollout_func``; None: nothing.
        args: of the run.
        several_turns: whether there are tools or environments.
    """
    if function is not None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ValueError(
                f"rollout_func: expected a plain function (prompts, trainer), got {function!r}"
            )
        if several_turns:
            raise ValueError(
                "rollout_func: expected neither tools nor environment_factory with it: the "
                "function makes whole completions"
            )
    if args.generation_batches_ahead and (several_turns or function is not None):
        raise ValueError(
            "generation_batches_ahead: expected 0 with tools, environment_factory and "
            "rollout_func, whose completions need the engine more than once, got "
            f"{args.generation_batches_ahead}"
        )


def samples_by(
    function: Callable[[list[Prompt]], Mapping[str, Any]],
    sampler: Sampler,
    samples: list[Sample],
) -> Metrics:
    """Complete ``samples`` by ``function``: it gets the prompts of this process, each as often as
    it is to be completed, and returns one entry per prompt in each field.

    Raises:
        ValueError: a field is missing, ragged or of the wrong kind.
    """
    context, prompts = sampler.context, [sample.prompt for sample in samples]
    if any(map(images_of, prompts)):
        raise ValueError("rollout_func: expected prompts of text, got images")
    fields = _fields(function(copy.deepcopy(prompts)), len(samples))
    prompt_ids, completion_ids = (_ids(name, fields.pop(name)) for name in _NEEDED[:2])
    _check_lengths(prompt_ids, completion_ids, context)
    logprobs, mask = fields.pop("logprobs"), fields.pop("env_mask", None)
    candidates = fields.get("logprob_token_ids")
    given = {"logprobs": logprobs, "env_mask": mask, "logprob_token_ids": candidates}
    for name, column in given.items():
        _check_per_token(name, column, completion_ids)
    if logprobs is not None:
        among = candidates or [[None] * len(ids) for ids in completion_ids]
        parts = zip(logprobs, among, completion_ids, strict=True)
        logprobs = [[*map(_logprob, *row)] for row in parts]
    texts = decode_completions(completion_ids, prompts, context.tokenizer)
    for index, (sample, text) in enumerate(zip(samples, texts, strict=True)):
        sample.prompt_ids = prompt_ids[index]
        sample.completed(text, completion_ids[index], sampler.eos_token_ids)
        sample.logprobs = logprobs and logprobs[index]
        sample.env_mask = mask and [int(bool(one)) for one in mask[index]]
        sample.inputs |= {name: column[index] for name, column in fields.items()}
    return Metrics({})


def _check_lengths(
    prompt_ids: list[list[int]], completion_ids: list[list[int]], context: EngineContext
) -> None:
    longest, most = max(map(len, completion_ids)), context.args.max_completion_length
    if longest > most:
        raise ValueError(
            f"rollout_func: expected completion_ids of at most max_completion_length = {most} "
            f"tokens, got {longest}"
        )
    pairs = zip(prompt_ids, completion_ids, strict=True)
    length = max(len(prompt) + len(completion) for prompt, completion in pairs)
    if context.positions is not None and length > context.positions:
        raise ValueError(
            f"rollout_func: expected at most {context.positions} tokens of prompt and completion, "
            f"the model's positions, got {length}"
        )


def _fields(answer: Any, count: int) -> dict[str, Any]:
    """Return what the function returned, numbers as Python's."""
    if not isinstance(answer, Mapping):
        raise ValueError(f"rollout_func: expected a dictionary, got {type(answer).__name__}")
    missing = [name for name in _NEEDED if name not in answer]
    if missing:
        raise ValueError(
            f"rollout_func: expected {', '.join(_NEEDED)} (the last may be None), got a dictionary "
            f"without {', '.join(missing)}"
        )
    taken = [name for name in _TAKEN if name in answer]
    if taken:
        raise ValueError(f"rollout_func: expected other names for its columns than {taken[0]!r}")
    fields = {name: _plain(value) for name, value in answer.items()}
    for name, column in fields.items():
        if column is None and name in ("logprobs", "env_mask"):
            continue
        if not isinstance(column, list | tuple) or len(column) != count:
            got = len(column) if isinstance(column, list | tuple) else type(column).__name__
            raise ValueError(
                f"rollout_func: expected {count} entries in {name!r}, one per prompt, got {got}"
            )
    return fields


def _plain(column: Any) -> Any:
    """Return ``column`` without tensors: some write a list of them."""
    if hasattr(column, "tolist"):
        return column.tolist()
    if isinstance(column, list | tuple):
        return [item.tolist() if hasattr(item, "tolist") else item for item in column]
    return column


def _ids(name: str, column: Any) -> list[list[int]]:
    for row in column:
        good = isinstance(row, list | tuple) and row
        if not good or not all(type(token) is int and token >= 0 for token in row):
            raise ValueError(f"rollout_func: expected lists of token ids in {name!r}, got {row!r}")
    return [list(row) for row in column]


def _logprob(given: Any, candidates: list[int] | None, token: int) -> float:
    """Return that of ``token``, NaN where unknown: a number, or one of a list, by its id."""
    if isinstance(given, list | tuple):
        if candidates is None and len(given) == 1:
            [given] = given
        elif isinstance(candidates, list | tuple) and len(candidates) == len(given):
            given = dict(zip(candidates, given, strict=True)).get(token)
        else:
            raise ValueError(
                "rollout_func: expected one id in 'logprob_token_ids' for each of several "
                f"'logprobs' of a token, got {candidates!r} for {given!r}"
            )
    return math.nan if given is None else float(given)


def _check_per_token(name: str, column: Any, completion_ids: list[list[int]]) -> None:
    for index, ids in enumerate(completion_ids):
        if column is not None and len(column[index]) != len(ids):
            raise ValueError(
                f"rollout_func: expected one value per token in {name!r}, got "
                f"{len(column[index])} for the {len(ids)} tokens of completion {index}"
            )
