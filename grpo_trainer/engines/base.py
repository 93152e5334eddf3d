"""The interface of rollout engines, and sampling settings that are the same for every engine."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_trainer.common import shortened
from grpo_trainer.config import OF_SAMPLING, GRPOConfig, options
from grpo_trainer.data import (
    ImageInputs,
    ProcessingClass,
    Sample,
    encode_prompts,
    has_images,
    tokenizer_of,
)
from grpo_trainer.engines.answers import Completions, TokenIds
from grpo_trainer.policy import WHOLE, Placement, base_policy

logger = logging.getLogger(__name__)

Images = Sequence[ImageInputs | None] | None  # one entry per prompt
# Called once per update: yields checkpoint names and tensors, one by one. A tensor may share the
# policy's memory: copy it before the next optimizer step, and never write to it.
Weights = Iterator[tuple[str, Tensor]]
WeightSource = Callable[[], Weights]

MAX_LOGPROBS = 1024  # the most ids per token that an engine reports
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "image_token_index", "video_token_index")
_NEVER = -100.0  # added to a logit: the smallest value that vLLM accepts
_WALK = "walk"  # from the first process to the others: gather the weights with me
_TIES = 8  # top_k keeps all ids as likely as its last one; rounded logits often tie


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How completions are sampled, the same for every engine."""

    eos_token_ids: frozenset[int]  # each ends a completion, and is part of it
    max_tokens: int  # for the longest completion
    temperature: float = 1.0  # this and the next four: as in GRPOConfig
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    # never sampled: they represent parts of images, which a forward over a completion would look
    # for, or are ids beyond a teacher's vocabulary
    suppressed: frozenset[int] = frozenset()
    structured_outputs_regex: str | None = None  # a completion's text must match; None: anything
    # report which of this many likeliest ids the filters kept, per token; 0: do not report
    sampling_mask_size: int = 0
    # the rest of generation_kwargs, in the engine's own names
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        args: GRPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel | None = None,
        vocab_size: int | None = None,
    ) -> Sampling:
        """Return the sampling of ``args``; generation_kwargs override the other fields.

        Only ids of ``model`` below ``vocab_size`` are sampled; None: all of them.

        Completions end with the tokens that the tokenizer and ``model`` name. An ``eos_token_id``
        in generation_kwargs replaces them; ``stop_token_ids`` there are added.
        """
        base = None if model is None else base_policy(model)
        config = getattr(base, "config", None)
        text = None if config is None else config.get_text_config()
        size = len(tokenizer) if text is None else text.vocab_size
        extra = dict(options("generation_kwargs", args.generation_kwargs))
        settings = {name: extra.pop(name, getattr(args, name)) for name in OF_SAMPLING}
        if args.use_sampling_mask:
            settings["sampling_mask_size"] = min(settings["top_k"] + _TIES, len(tokenizer))
        more = _checked("stop_token_ids", extra.pop("stop_token_ids", None), size)
        if "eos_token_id" in extra:
            ends = _checked("eos_token_id", extra.pop("eos_token_id"), size)
        else:  # a chat model ends its turn with another token than a document
            generation = getattr(base, "generation_config", None)
            of_model = _listed(getattr(generation, "eos_token_id", None))
            of_model = of_model or _listed(getattr(text, "eos_token_id", None))
            named = _listed(tokenizer.eos_token_id) + of_model
            unknown = [token for token in named if not 0 <= token < size]
            if unknown:
                message = "eos_token_id %s ignored: the model's token ids are 0 to %d"
                logger.warning(message, ", ".join(map(str, unknown)), size - 1)
            ends = [token for token in named if token not in unknown]
        beyond = range(size if vocab_size is None else vocab_size, size)
        return cls(
            eos_token_ids=frozenset(ends + more),
            max_tokens=args.max_completion_length,
            suppressed=frozenset(beyond).union(() if base is None else image_token_ids(base)),
            structured_outputs_regex=args.vllm_structured_outputs_regex,
            engine_options=extra,
            **settings,
        )

    @property
    def most_gain(self) -> float:
        """The most by which filters and penalties can raise the log-probability that an engine
        reports above the policy's."""
        if self.repetition_penalty != 1:
            return math.inf
        if self.sampling_mask_size:  # the policy's log-probability is filtered, too
            return 0.0
        return math.inf if self.top_k or self.min_p else -math.log(self.top_p)

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings with the same name in all engines."""
        return {name: getattr(self, name) for name in OF_SAMPLING}


def image_token_ids(model: nn.Module) -> frozenset[int]:
    """Return the ids that represent parts of images, which a forward looks for."""
    config = getattr(base_policy(model), "config", None)
    ids = (getattr(config, name, None) for name in _IMAGE_TOKENS)
    return frozenset(each for each in ids if isinstance(each, int))


def vllm_params(sampling: Sampling) -> dict[str, Any]:
    """Return the sampling parameters for vLLM, in the process or as a server, except ``n``.

    Raises:
        ValueError: generation_kwargs sets one of them again.
    """
    params = sampling.parameters | {
        "min_p": sampling.min_p or 0.0,
        "max_tokens": sampling.max_tokens,
        "logprobs": sampling.sampling_mask_size,  # 0: only for the sampled token
        # the tokens that end a completion are set here; a model folder may name others
        "stop_token_ids": sorted(sampling.eos_token_ids),
        "ignore_eos": True,
    }
    if sampling.suppressed:
        params["logit_bias"] = dict.fromkeys(sorted(sampling.suppressed), _NEVER)
    if sampling.structured_outputs_regex is not None:
        params["structured_outputs"] = {"regex": sampling.structured_outputs_regex}
    again = sorted(set(params) & set(sampling.engine_options))
    if again:
        raise ValueError(
            f"generation_kwargs: expected none of {', '.join(again)}, which are already set"
        )
    return params | dict(sampling.engine_options)


def _listed(ids: Any) -> list[Any]:
    if ids is None:
        return []
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def _checked(name: str, ids: Any, size: int) -> list[int]:
    tokens = _listed(ids)
    if not all(type(token) is int and 0 <= token < size for token in tokens):
        raise ValueError(
            f"generation_kwargs[{name!r}]: expected token ids below {size}, got {ids!r}"
        )
    return tokens


class RolloutEngine(Protocol):
    """Samples one completion per prompt. In a distributed run every process calls every method.

    Subclasses override only what they need: the other methods do nothing.

    An engine with its own weights can generate while the policy trains. It then also has the
    coroutine method ``complete_one(prompt_ids, sampling, images=None)``, which completes one
    prompt, with its images, and returns a :class:`Completion`. Each process calls it separately,
    for many prompts at the same time, on a background event loop. It is canceled if a run ends
    early.
    """

    keeps_weights: bool = True  # after ``generate``; False: each ``generate`` needs an update first
    takes_adapter: bool = False  # gets base weights once, then LoRA factors with ``adapter=True``
    has_base: bool = False  # with ``takes_adapter``: it loads the base weights itself
    # weights may arrive while ``complete_one`` runs: its ``versions`` then give the number of
    # updates before each token
    updates_in_flight: bool = False

    def generate(
        self, prompt_ids: list[TokenIds], sampling: Sampling, images: Images = None
    ) -> Completions:
        """Return completions of this process's prompts with the weights of the last update.

        A prompt may be a conversation with images in several turns. An engine without the parameter
        ``images`` gets only text prompts.
        """
        ...

    def update_weights(self, weights: WeightSource, adapter: bool = False) -> None:
        """Load the policy's weights; called before the first ``generate``, and after each change.
        ``weights`` stays valid until the next update, and can be called again.

        If the policy is sharded, each tensor is gathered in turn: all processes must iterate over
        ``weights`` together, to the end, even if they do not use them.
        """
        return

    def close(self) -> None:
        """Stop everything the engine started. It is not used afterward."""
        return


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """The inputs for creating an engine."""

    policy: Callable[[], PreTrainedModel]  # unwrapped; called when needed, since wrapping is late
    processing_class: ProcessingClass  # the policy's tokenizer or processor
    args: GRPOConfig
    accelerator: Accelerator
    placement: Placement = WHOLE  # of the policy's parameters
    positions: int | None = None  # the policy's positions, in tokens; None: unlimited
    # ids below it have an embedding in the policy and in a teacher that reads them; None: unknown
    vocab_size: int | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.processing_class)

    def encode(
        self, samples: Sequence[Sample], tools: Sequence[list[dict[str, Any]]] | None = None
    ) -> None:
        """Add the policy's inputs for their prompts to ``samples``; ``tools`` as in
        :func:`encode_prompts`.

        Raises:
            ValueError: a prompt cannot be encoded, leaves no room for its completion, or has tokens
                without an embedding.
        """
        args, length = self.args, self.args.max_completion_length
        if self.positions is not None and length >= self.positions:
            raise ValueError(
                f"max_completion_length: expected less than the model's {self.positions} "
                f"positions, which must also hold the prompt, got {length}"
            )
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        prompts = [sample.prompt for sample in samples]
        encoded = encode_prompts(
            prompts, self.processing_class, args.max_prompt_length, template, tools
        )
        for sample, (ids, images) in zip(samples, encoded, strict=True):
            if self.positions is not None and len(ids) > self.positions - length:
                raise ValueError(
                    f"prompt: expected at most {self.positions - length} tokens (the model's "
                    f"{self.positions} positions less max_completion_length = {length}), got "
                    f"{len(ids)} tokens from {shortened(sample.prompt)}; reduce "
                    "max_completion_length, or set max_prompt_length to cut prompts"
                )
            most = self.vocab_size
            if most is not None and not has_images([images]) and max(ids) >= most:
                raise ValueError(
                    f"prompt: expected ids below {most}, for which the model has embeddings, got "
                    f"{max(ids)} from {shortened(sample.prompt)}; check that the tokenizer belongs "
                    "to the model, and that its embeddings were resized for new tokens"
                )
            sample.prompt_ids, sample.images = ids, images


def on_first_process(
    accelerator: Accelerator,
    gathers: bool,
    work: Callable[[WeightSource], Any],
    weights: WeightSource = lambda: iter(()),
) -> Any:
    """Run ``work`` on the first process; all processes return its result, or raise its error.

    It may read the ``weights`` any number of times. ``gathers``: all processes read them together.
    """
    if accelerator.num_processes == 1:
        return work(weights)
    outcome: list[Any] = [None, None]
    if accelerator.is_main_process:
        walk: Weights = iter(())

        def lead() -> Weights:
            nonlocal walk
            deque(walk, maxlen=0)  # finish an interrupted walk: the others go to its end
            broadcast_object_list([_WALK, None])
            walk = weights()
            return walk

        try:
            outcome[0] = work(lead if gathers else weights)
        except (RuntimeError, ValueError) as error:
            outcome[1] = error
        deque(walk, maxlen=0)
        broadcast_object_list(outcome)
    else:
        broadcast_object_list(outcome)
        while outcome[0] == _WALK:
            deque(weights(), maxlen=0)
            broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def raise_on_all(accelerator: Accelerator, error: Exception | None) -> None:
    """Raise ``error``, or else another process's error, if there is one; all call it."""
    text = None if error is None else f"{type(error).__name__}: {error}"
    texts = [text] if accelerator.num_processes == 1 else gather_object([text])
    if error is not None:
        raise error
    for process, other in enumerate(texts):
        if other is not None:
            raise RuntimeError(f"process {process}: {other}")


def cut_after_eos(token_ids: TokenIds, eos_token_ids: Collection[int]) -> TokenIds:
    """Return ``token_ids`` up to and including the first end-of-sequence token."""
    for index, token in enumerate(token_ids):
        if token in eos_token_ids:
            return token_ids[: index + 1]
    return token_ids
