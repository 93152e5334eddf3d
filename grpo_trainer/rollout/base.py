"""What every rollout engine does: it samples completions, and takes new weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.rollout.ends import end_token_ids

TokenIds = list[int]
_TIES = 8  # top_k keeps all ids as likely as its last one; rounded logits make them frequent
# Called once per update: yields checkpoint names and tensors, one after the other. A tensor may be
# the policy's own memory, so it is copied before the next optimizer step and never written to.
WeightSource = Callable[[], Iterator[tuple[str, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are drawn, for every engine alike.

    Args:
        eos_token_ids: tokens that end a completion; it keeps the one it ends with.
        max_tokens: longest completion.
        temperature, top_p, top_k, min_p, repetition_penalty: as in GRPOConfig.
        structured_outputs_regex: what the text of a completion must match; None: anything.
        sampling_mask_size: report what the filters left of so many of each token's likeliest ids;
            0: do not.
        engine_options: the rest of generation_kwargs, in the engine's own names.
    """

    eos_token_ids: frozenset[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    structured_outputs_regex: str | None = None
    sampling_mask_size: int = 0
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        args: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel | None = None,
    ) -> Sampling:
        """Return what ``args`` asks for. generation_kwargs override the other fields.

        Completions end with the tokens that tokenizer and ``model`` name. An ``eos_token_id`` in
        generation_kwargs replaces them, ``stop_token_ids`` there come in addition.
        """
        settings: dict[str, Any] = {
            "temperature": args.temperature,
            "top_p": args.top_p,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty,
        }
        extra = dict(options("generation_kwargs", args.generation_kwargs))
        settings |= {name: extra.pop(name) for name in tuple(settings) if name in extra}
        if args.use_sampling_mask:
            settings["sampling_mask_size"] = min(settings["top_k"] + _TIES, len(tokenizer))
        return cls(
            eos_token_ids=end_token_ids(extra, tokenizer, model),
            max_tokens=args.max_completion_length,
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            engine_options=extra,
            **settings,
        )


class Completions(NamedTuple):
    """One completion per prompt, each up to and including its first end-of-sequence token."""

    token_ids: list[TokenIds]
    # of each token, under the distribution it was drawn from; None: the engine does not say
    logprobs: list[list[float]] | None = None
    # of each token, the ids that the sampling filters left to choose from; None: not asked for
    sampling_mask: list[list[TokenIds]] | None = None


class RolloutEngine(Protocol):
    """Samples one completion per prompt. In a distributed run every process calls every method.

    An engine that inherits from it says only what it does itself: the rest does nothing.
    """

    def generate(self, prompt_ids: list[TokenIds], sampling: Sampling) -> Completions:
        """Return completions of this process's prompts, by the weights of the last update."""
        ...

    def update_weights(self, weights: WeightSource) -> None:
        """Take over the policy's weights; called before the first ``generate``, and when they
        changed. ``weights`` stays valid until the next update, and can be called again."""
        return

    def sleep(self) -> None:
        """Give memory back until ``wake``, if it can. Weights may be lost: an update follows."""
        return

    def wake(self) -> None:
        """Take the memory again."""
        return

    def close(self) -> None:
        """End what the engine started. It is not used afterwards."""
        return


class WeightsLostError(RuntimeError):
    """A generation in the background came to nothing: the engine has lost the weights for it, and
    nobody else has them any more."""


class Pending(Protocol):
    """A generation that was started. Every process has one, and calls the same methods."""

    def result(self) -> Completions:
        """Wait for the completions of this process's prompts; called once.

        Raises:
            WeightsLostError: the engine needs an update, and to be asked again.
            Exception: what went wrong, with the traceback of where it did.
        """
        ...

    def cancel(self) -> None:
        """End the generation, in place of ``result``; nothing of it runs afterwards."""
        ...


@runtime_checkable
class BackgroundEngine(RolloutEngine, Protocol):
    """An engine that can generate while the policy trains: it has weights of its own."""

    def start(self, prompt_ids: list[TokenIds], sampling: Sampling) -> Pending:
        """Generate, but return at once. Nothing else is asked of the engine until
        ``result`` or ``cancel`` was called."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine is made from."""

    policy: Callable[[], PreTrainedModel]  # unwrapped; asked when needed, wrapping happens late
    tokenizer: PreTrainedTokenizerBase
    args: GRPOConfig
    accelerator: Accelerator


def cut_after_eos(token_ids: TokenIds, eos_token_ids: Collection[int]) -> TokenIds:
    """Return ``token_ids`` up to and including the first end-of-sequence token."""
    for index, token in enumerate(token_ids):
        if token in eos_token_ids:
            return token_ids[: index + 1]
    return token_ids


def runs(prompt_ids: list[TokenIds]) -> list[tuple[TokenIds, int]]:
    """Count prompts that follow themselves: a group is one prompt, sampled n times."""
    found: list[tuple[TokenIds, int]] = []
    for ids in prompt_ids:
        if found and found[-1][0] == ids:
            found[-1] = (ids, found[-1][1] + 1)
        else:
            found.append((ids, 1))
    return found
