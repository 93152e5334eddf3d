"""What every rollout engine does: it samples completions, and takes new weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import (
    Encoded,
    ImageInputs,
    ProcessingClass,
    Prompt,
    encode_prompts,
    tokenizer_of,
)
from grpo_trainer.engines.sampling import Sampling
from grpo_trainer.policy import WHOLE, Placement

TokenIds = list[int]
Images = Sequence[ImageInputs | None] | None  # of prompts, one each
# Called once per update: yields checkpoint names and tensors, one after the other. A tensor may be
# the policy's own memory, so it is copied before the next optimizer step and never written to.
WeightSource = Callable[[], Iterator[tuple[str, Tensor]]]


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

    keeps_weights: bool = True  # after ``generate``; False: an update comes before the next one

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Return completions of this process's prompts, by the weights of the last update.

        A prompt may be a conversation with images in several turns. An engine without the parameter
        ``images`` is asked to complete text alone.
        """
        ...

    def update_weights(self, weights: WeightSource) -> None:
        """Take over the policy's weights; called before the first ``generate``, and when they
        changed. ``weights`` stays valid until the next update, and can be called again.

        Where the policy is sharded each tensor is gathered for its turn: all processes walk through
        ``weights`` together, to the end, also those that have no use for them.
        """
        return

    def close(self) -> None:
        """End what the engine started. It is not used afterwards."""
        return


class Pending(Protocol):
    """A generation that was started. Every process has one, and calls the same methods."""

    def result(self) -> Completions:
        """Wait for the completions of this process's prompts; called once.

        Raises:
            Exception: what went wrong, with the traceback of where it did.
        """
        ...

    def cancel(self) -> None:
        """End the generation, in place of ``result``; nothing of it runs afterwards."""
        ...


@runtime_checkable
class BackgroundEngine(RolloutEngine, Protocol):
    """An engine that can generate while the policy trains: it has weights of its own."""

    def start(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Pending:
        """Generate, but return at once. Nothing else is asked of the engine until
        ``result`` or ``cancel`` was called."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """What an engine is made from."""

    policy: Callable[[], PreTrainedModel]  # unwrapped; asked when needed, wrapping happens late
    processing_class: ProcessingClass  # the policy's tokenizer or processor
    args: GRPOConfig
    accelerator: Accelerator
    placement: Placement = WHOLE  # of the policy's parameters
    positions: int | None = None  # tokens that the policy has positions for; None: any number

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.processing_class)

    def encode(
        self, prompts: Sequence[Prompt], tools: Sequence[list[dict[str, Any]]] | None = None
    ) -> list[Encoded]:
        """Return prompts as the policy takes them; ``tools`` as in :func:`encode_prompts`.

        Raises:
            ValueError: one cannot be encoded, or leaves no room for its completion.
        """
        args, length = self.args, self.args.max_completion_length
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        encoded = encode_prompts(
            prompts, self.processing_class, args.max_prompt_length, template, tools
        )
        if self.positions is not None:
            pairs = zip(prompts, encoded, strict=True)
            prompt, (ids, _) = max(pairs, key=lambda pair: len(pair[1].ids))
            if len(ids) > self.positions - length:
                raise ValueError(
                    f"prompt: expected at most {self.positions - length} tokens (the model's "
                    f"{self.positions} positions less max_completion_length = {length}), got "
                    f"{len(ids)} tokens from {shortened(prompt)}; max_prompt_length cuts prompts"
                )
        return encoded


def cut_after_eos(token_ids: TokenIds, eos_token_ids: Collection[int]) -> TokenIds:
    """Return ``token_ids`` up to and including the first end-of-sequence token."""
    for index, token in enumerate(token_ids):
        if token in eos_token_ids:
            return token_ids[: index + 1]
    return token_ids
