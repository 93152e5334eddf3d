"""Completions from the user's function, checked."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from grpo_kernels.losses import Metrics
from grpo_trainer.common import in_background
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import Prompt, Sample, decode_completions, images_of
from grpo_trainer.engines import Completion, EngineContext, Sampler, check_length, checked_ids
from grpo_trainer.monitor import phase

# (prompts, trainer) -> {"prompt_ids", "completion_ids", "logprobs", "env_mask", others}
RolloutFunction: TypeAlias = Callable[[list[Prompt], Any], Mapping[str, Any]]

_NEEDED = ("prompt_ids", "completion_ids", "logprobs")
_OURS = (*_NEEDED, "env_mask", "rollout_versions")  # reward functions get the other columns
# arguments that reward functions get anyway
_TAKEN = ("prompts", "completions", "trainer_state", "log_extra", "log_metric")


def check_rollout_func(function: Any, args: GRPOConfig, several_turns: bool) -> None:
    """Raise ValueError unless ``function`` can produce the completions.

    Args:
        function: the value of ``rollout_func``; None: not given.
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
                "rollout_func: expected neither tools nor environment_factory with it, since the "
                "function returns whole completions"
            )
        if args.use_rollout_routing_replay:
            raise ValueError(
                "rollout_func: expected none with use_rollout_routing_replay, which needs the "
                "experts of the rollout engine"
            )


@dataclass(frozen=True, eq=False)
class ByFunction:
    """Completes samples with the user's function: it gets this process's prompts, each repeated
    once per completion, and returns one entry per prompt in each field.

    Args:
        function: the user's function.
        sampler: the function samples with it.
        context: has a processing class that no other thread uses.
    """

    function: Callable[[list[Prompt]], Mapping[str, Any]]
    sampler: Sampler
    context: EngineContext

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples``; ValueError for a field that is missing, ragged or of the wrong
        type."""
        # generating waits for pending work, and the function may hold a lock meanwhile
        self.sampler.settle()
        with phase("generate"):
            self._complete(samples)
        return Metrics({})

    async def ahead(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` in the background, with the function on its own thread."""
        await in_background(partial(self._complete, samples))
        return Metrics({})

    def _complete(self, samples: list[Sample]) -> None:
        prompts = [sample.prompt for sample in samples]
        if any(map(images_of, prompts)):
            raise ValueError("rollout_func: expected text prompts, got images")
        before = self.sampler.version
        fields = _fields(self.function(copy.deepcopy(prompts)), len(samples))
        if fields["logprobs"] is None and self.context.args.generation_batches_ahead:
            raise ValueError(
                "rollout_func: expected 'logprobs' with generation_batches_ahead, with which the "
                "loss corrects for older weights, got None"
            )
        columns = {name: fields.pop(name, None) for name in _OURS}
        columns["logprob_token_ids"] = fields.get("logprob_token_ids")
        for number, sample in enumerate(samples):
            row = {name: column and column[number] for name, column in columns.items()}
            try:
                _complete(sample, self.sampler, **row)
            except ValueError as error:
                raise ValueError(f"rollout_func: completion {number}: {error}") from error
            if sample.rollout_versions is None:
                sample.rollout_versions = [before] * len(sample.completion_ids)
            sample.columns = {name: column[number] for name, column in fields.items()}
            sample.inputs |= sample.columns
        ids = [sample.completion_ids for sample in samples]
        texts = decode_completions(ids, prompts, self.context.tokenizer)
        for sample, text in zip(samples, texts, strict=True):
            sample.completed(text, sample.completion_ids, self.sampler.eos_token_ids)


def check_completion(sample: Sample, sampler: Sampler) -> None:
    """Raise ValueError unless a completed sample is valid as the result of a ``rollout_func``."""
    _complete(
        sample,
        sampler,
        prompt_ids=sample.prompt_ids,
        completion_ids=sample.completion_ids,
        logprobs=sample.logprobs,
        env_mask=sample.env_mask,
        rollout_versions=sample.rollout_versions,
        logprob_token_ids=None,
    )


def _complete(
    sample: Sample,
    sampler: Sampler,
    *,
    prompt_ids: Any,
    completion_ids: Any,
    logprobs: Any,
    env_mask: Any,
    rollout_versions: Any,
    logprob_token_ids: Any,
) -> None:
    """Add tokens and their data."""
    context = sampler.context
    sample.prompt_ids = checked_ids(prompt_ids, context.vocab_size, "prompt_ids")
    completion_ids = checked_ids(completion_ids, context.vocab_size, "completion_ids")
    if not prompt_ids:
        raise ValueError("expected a prompt of at least one token, got none")
    columns = {
        "env_mask": env_mask,
        "logprobs": logprobs,
        "logprob_token_ids": logprob_token_ids,
        "rollout_versions": rollout_versions,
    }
    for name, column in columns.items():
        check_length(f"value of {name!r}", column, len(completion_ids))
    if logprobs is not None:
        among = logprob_token_ids or [None] * len(completion_ids)
        logprobs = [*map(_logprob, logprobs, among, completion_ids)]
    if env_mask is not None:
        sample.env_mask = [int(bool(one)) for one in env_mask]
        if logprobs is not None:  # log-probabilities of other tokens are not used
            pairs = zip(logprobs, sample.env_mask, strict=True)
            logprobs = [value if drawn else None for value, drawn in pairs]
    if rollout_versions is not None:
        rollout_versions = [_version(value, sampler.step()) for value in rollout_versions]
    completion = Completion(completion_ids, logprobs).checked(
        max_tokens=sampler.sampling.max_tokens, vocab_size=context.vocab_size
    )
    sample.completion_ids, sample.logprobs = completion.token_ids, completion.logprobs
    sample.rollout_versions = rollout_versions
    length = len(sample.prompt_ids) + len(sample.completion_ids)
    if context.positions is not None and length > context.positions:
        raise ValueError(
            f"expected at most {context.positions} tokens in prompt and completion, the model's "
            f"positions, got {length}"
        )


def _fields(answer: Any, count: int) -> dict[str, Any]:
    """Return the function's result with Python numbers."""
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
        raise ValueError(f"rollout_func: expected another column name than {taken[0]!r}")
    fields = {name: _plain(value) for name, value in answer.items()}
    for name, column in fields.items():
        if column is None and name in ("logprobs", "env_mask", "rollout_versions"):
            continue
        if not isinstance(column, list | tuple) or len(column) != count:
            got = len(column) if isinstance(column, list | tuple) else type(column).__name__
            raise ValueError(
                f"rollout_func: expected {count} entries in {name!r}, one per prompt, got {got}"
            )
    return fields


def _plain(column: Any) -> Any:
    """Return ``column`` without tensors: it may be a list of them."""
    if hasattr(column, "tolist"):
        return column.tolist()
    if isinstance(column, list | tuple):
        return [item.tolist() if hasattr(item, "tolist") else item for item in column]
    return column


def _version(value: Any, step: int) -> int:
    """Return the optimizer steps before a token's weights, as a Python integer."""
    if type(value) is not int or not 0 <= value <= step:
        raise ValueError(
            f"expected 'rollout_versions' from 0 to {step}, the optimizer steps so far, got "
            f"{value!r}"
        )
    return value


def _logprob(given: Any, candidates: list[int] | None, token: int) -> Any:
    """Return the log-probability of ``token``, None if unknown: a number, or one from a list."""
    if isinstance(given, list | tuple):
        if candidates is None and len(given) == 1:
            [given] = given
        elif isinstance(candidates, list | tuple) and len(candidates) == len(given):
            given = dict(zip(candidates, given, strict=True)).get(token)
        else:
            raise ValueError(
                "expected one id in 'logprob_token_ids' for each of several "
                f"'logprobs' of a token, got {candidates!r} for {given!r}"
            )
    return given
