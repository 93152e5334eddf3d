"""Completions in several turns: the policy writes, its tools answer, the policy continues."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import ProcessorMixin

from grpo_kernels.losses import Metrics
from grpo_trainer.agents.parse import Message, TurnParser
from grpo_trainer.agents.template import ToolTemplate, result_message
from grpo_trainer.agents.tools import Environments, Outcome, Toolbox, bind, run_tools, schemas
from grpo_trainer.common import in_background, shortened, together
from grpo_trainer.config import options
from grpo_trainer.data import Encoded, ImageInputs, Media, Sample
from grpo_trainer.engines import Completion, EngineContext, Sampler, image_token_ids
from grpo_trainer.monitor import phase, value_metric


@dataclass
class Conversation:
    """One prompt, and everything that the policy and its tools have added so far."""

    sample: Sample
    environment: Any  # its tools act on it; may be None
    toolbox: Toolbox
    budget: int  # tokens for the whole completion, including results of tools
    calls: list[dict[str, Any]] = field(default_factory=list)  # name, arguments: from the last turn
    rounds: int = 0  # rounds of calls that were answered
    over: bool = False
    turn_start: int = 0  # index in the completion

    @property
    def ids(self) -> list[int]:
        """The tokens so far, which the policy continues."""
        return self.sample.prompt_ids + self.sample.completion_ids

    @property
    def room(self) -> int:
        """Tokens left."""
        return self.budget - len(self.sample.completion_ids)

    def add(self, tokens: Completion, by_policy: int) -> None:
        """Add as many tokens as there is room for."""
        count, sample = min(len(tokens.token_ids), self.room), self.sample
        if tokens.routed_experts is not None:
            cut = len(tokens.token_ids) - count
            self._add_experts(tokens.routed_experts[: len(tokens.routed_experts) - cut])
        sample.completion_ids += tokens.token_ids[:count]
        columns: dict[str, Any] = {
            "env_mask": [by_policy] * count,
            "logprobs": tokens.logprobs,
            "sampling_mask": tokens.sampling_mask,
            "rollout_versions": tokens.versions,
        }
        for name, values in columns.items():
            column = getattr(sample, name)
            extended = None if column is None or values is None else column + values[:count]
            setattr(sample, name, extended)

    def _add_experts(self, reported: Tensor) -> None:
        """Add the experts of tokens that earlier turns did not report, including tool results."""
        known = self.sample.routed_experts
        if known is not None:
            reported = torch.cat([known, reported[len(known) :]])
        self.sample.routed_experts = reported

    def end_turn(self, message: Message, complete: bool) -> None:
        """Add the policy's message. An incomplete turn calls nothing."""
        self.sample.completion.append(message)
        self.sample.truncated = not complete
        self.calls = [call["function"] for call in message.get("tool_calls") or ()]
        self.over = not complete or not self.calls

    def add_results(self, messages: list[Message], encoded: Encoded, start: int) -> None:
        """Add the results of tools: the tokens of ``encoded`` after ``start``. Results that leave
        no room for another turn are dropped."""
        self.calls = []
        ids = encoded.ids[start:]
        if len(ids) >= self.room:
            self.over = self.sample.truncated = True
            return
        self.rounds += 1
        self.sample.completion += messages
        if encoded.images is not None:
            images = self.sample.images or ImageInputs((), {}, [], 0)
            self.sample.images = images.followed(self.ids, encoded.images, start)
        versions = self.sample.rollout_versions
        last = versions and [versions[-1]] * len(ids)
        self.add(Completion(ids, [math.nan] * len(ids), [[]] * len(ids), last), by_policy=0)
        self.turn_start = len(self.sample.completion_ids)


@dataclass(eq=False)
class ToolLoop:
    """Samples completions that call tools.

    A batch advances turn by turn: the engine continues every unfinished conversation, then the
    tools answer all calls. All processes take part until no process has an unfinished conversation,
    since some engines serve all processes at once. In the background, each conversation continues
    at its own pace.

    Args:
        sampler: samples turns.
        context: has a processing class that no other thread uses.
        tools: every completion can call them.
        environments: completions act on them, and call their tools.

    Raises:
        ValueError: the chat template cannot write conversations with these tools.
    """

    sampler: Sampler
    context: EngineContext
    tools: Toolbox
    environments: Environments | None

    def __post_init__(self) -> None:
        context = self.context
        eos = self.sampler.eos_token_ids
        tokenizer = context.tokenizer
        self._parser = TurnParser(tokenizer, eos, families=True)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # in characters
        template = options("chat_template_kwargs", context.args.chat_template_kwargs)
        self._template = ToolTemplate(context.processing_class, eos, template)
        for toolbox in self.environments.toolboxes if self.environments else [self.tools]:
            if toolbox:
                self._template.check(schemas(toolbox), self._parser)
        image_ids = list(image_token_ids(context.policy()))
        self._image_tokens = tokenizer.convert_ids_to_tokens(image_ids)
        if isinstance(context.processing_class, ProcessorMixin):  # the token in its templates
            self._image_tokens.append(context.processing_class.image_token)

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Add messages and the tokens of all turns to ``samples``, and return the tools' metrics.

        Raises:
            ValueError: a prompt is not a list of messages, or is too long.
        """
        with phase("generate"):
            unfinished = self._begin(samples)
            outcomes: list[Outcome] = []
            while (max_tokens := self._max_tokens(unfinished)) is not None:
                self._sample_turn(unfinished, max_tokens)
                outcomes += self._answer([c for c in unfinished if c.calls and not c.over])
                unfinished = [c for c in unfinished if not c.over]
        return self._metrics(outcomes, len(samples))

    async def ahead(self, samples: list[Sample]) -> Metrics:
        """Complete ``samples`` in the background; see :class:`Source`."""
        outcomes = await together([self._converse(sample) for sample in samples])
        return self._metrics(list(chain(*outcomes)), len(samples))

    async def _converse(self, sample: Sample) -> list[Outcome]:
        """Complete one sample. The user's code, which may be slow, runs on other threads."""
        [conversation] = await in_background(partial(self._begin, [sample]))
        outcomes: list[Outcome] = []
        while not conversation.over:
            images = conversation.sample.images
            room = conversation.room
            turn = await self.sampler.complete(conversation.ids, room, images)
            self._add_turn(conversation, turn, room)
            if conversation.calls and not conversation.over:
                outcomes += await in_background(partial(self._answer, [conversation]))
        return outcomes

    def _metrics(self, outcomes: list[Outcome], completions: int) -> Metrics:
        calls, failures = len(outcomes), sum(outcome.failed for outcome in outcomes)
        device = self.context.accelerator.device
        per_completion = value_metric("tools/call_frequency", calls, device, completions)
        per_call = value_metric("tools/failure_frequency", failures, device, calls)
        return Metrics.merge([per_completion, per_call])

    def _begin(self, samples: list[Sample]) -> list[Conversation]:
        pairs: list[tuple[Any, Toolbox]] = [(None, self.tools)] * len(samples)
        if self.environments is not None:
            pairs, media = [*map(self.environments.take, samples)], Media.of(self.context.args)
            for sample, (environment, _) in zip(samples, pairs, strict=True):
                sample.prompt = self.environments.reset(environment, sample.inputs, media)
                sample.inputs["environments"] = environment
        for sample in samples:
            if isinstance(sample.prompt, str):
                raise ValueError(
                    f"prompt: expected messages with tools, got the text {shortened(sample.prompt)}"
                )
            sample.completion, sample.env_mask = [], []
            sample.logprobs, sample.sampling_mask, sample.rollout_versions = [], [], []
        self.context.encode(samples, [schemas(toolbox) for _, toolbox in pairs])
        budget = self.context.args.max_completion_length
        return [
            Conversation(sample, *pair, budget) for sample, pair in zip(samples, pairs, strict=True)
        ]

    def _max_tokens(self, conversations: list[Conversation]) -> int | None:
        """Return how many tokens to sample, the same on all processes; None if all have finished.

        It is the largest room of any conversation, within the policy's positions: a turn cut off by
        these continues in the next step.
        """
        room = max((conversation.room for conversation in conversations), default=0)
        longest = max((len(conversation.ids) for conversation in conversations), default=0)
        accelerator, positions = self.context.accelerator, self.context.positions
        if accelerator.num_processes > 1:
            local = torch.tensor([[room, longest]], device=accelerator.device)
            room, longest = accelerator.gather(local).amax(0).tolist()
        if room == 0:
            return None
        return room if positions is None else min(room, positions - longest)

    def _sample_turn(self, conversations: list[Conversation], max_tokens: int) -> None:
        """Add the policy's tokens to each conversation; most turns end here."""
        prompts = [conversation.ids for conversation in conversations]
        images = [conversation.sample.images for conversation in conversations]
        turns = self.sampler.generate(prompts, max_tokens, images)
        for conversation, turn in zip(conversations, turns.rows(), strict=True):
            self._add_turn(conversation, turn, max_tokens)

    def _add_turn(self, conversation: Conversation, turn: Completion, max_tokens: int) -> None:
        """Add the policy's turn, sampled with a limit of ``max_tokens``."""
        conversation.add(turn, by_policy=1)
        tokens = conversation.ids
        start = len(conversation.sample.prompt_ids) + conversation.turn_start
        ended = tokens[-1] in self.sampler.eos_token_ids
        # an engine that stops by itself, for example at a stop string, also ends the turn
        if ended or conversation.room == 0 or len(turn.token_ids) < max_tokens:
            tools = schemas(conversation.toolbox)
            message = self._parser.parse(tokens[start:], tokens[:start], tools)
            conversation.end_turn(message, complete=ended)

    def _answer(self, conversations: list[Conversation]) -> list[Outcome]:
        """Run the calls of each conversation, and add their results."""
        limit = self.context.args.max_tool_calling_iterations
        for conversation in conversations:
            conversation.over = limit is not None and conversation.rounds >= limit
        conversations = [c for c in conversations if not c.over]
        functions = [bind(c.toolbox, **call) for c in conversations for call in c.calls]
        outcomes = run_tools(functions, self._image_tokens, self.context.args.tool_timeout)
        remaining = iter(outcomes)
        for conversation in conversations:
            # longer results cannot fit, however they are tokenized: cut them first, instead of
            # tokenizing a whole book
            characters = conversation.room * self._longest_token
            messages = []
            for call in conversation.calls:
                outcome = next(remaining)
                blocks = [
                    block | {"text": block["text"][:characters]} if "text" in block else block
                    for block in outcome.blocks
                ]
                characters -= min(characters, sum(len(block.get("text", "")) for block in blocks))
                messages.append(result_message(call["name"], blocks))
                if outcome.timed_out and self.environments is not None:
                    self.environments.drop(conversation.environment)
            end, tools = conversation.ids[-1], schemas(conversation.toolbox)
            conversation.add_results(messages, *self._template.results(messages, tools, end))
        return outcomes
