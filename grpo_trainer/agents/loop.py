"""Completions in several turns: the policy writes, its tools answer, it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from transformers import ProcessorMixin

from grpo_kernels.losses import Metrics, Stat
from grpo_trainer.agents.environment import Environments
from grpo_trainer.agents.parse import Message, TurnParser, with_response_template
from grpo_trainer.agents.template import ToolTemplate, result_message
from grpo_trainer.agents.toolbox import Call, Outcome, Toolbox, ToolRunner, schemas
from grpo_trainer.common import shortened
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import (
    Encoded,
    ImageInputs,
    Media,
    ProcessingClass,
    Rollout,
    Row,
    check_context,
    encode_prompts,
    tokenizer_of,
    with_images,
)
from grpo_trainer.engines import Rollouts, Sampled
from grpo_trainer.monitor import phase

T = TypeVar("T")


@dataclass
class Conversation:
    """One prompt and what the policy and its tools have added so far.

    Args:
        rollout: the completion, which has nothing yet.
        toolbox: what the policy can call.
        budget: tokens for the whole completion, results of tools included.
        environment: what its tools act upon, if there is one.
    """

    rollout: Rollout
    toolbox: Toolbox
    budget: int
    environment: Any = None
    calls: list[Call] = field(default_factory=list)  # of the last turn, not answered yet
    rounds: int = 0  # of calls that were answered
    over: bool = False
    _turn: int = 0  # where the current turn begins

    @property
    def ids(self) -> list[int]:
        """What the policy reads next."""
        return self.rollout.prompt_ids + self.rollout.completion_ids

    @property
    def room(self) -> int:
        """Tokens left."""
        return self.budget - len(self.rollout.completion_ids)

    @property
    def turn_ids(self) -> list[int]:
        return self.rollout.completion_ids[self._turn :]

    @property
    def turn_prefix(self) -> list[int]:
        return self.rollout.prompt_ids + self.rollout.completion_ids[: self._turn]

    def add_tokens(
        self, ids: list[int], logprobs: list[float] | None, mask: list[list[int]] | None
    ) -> None:
        """Add tokens of the policy, as many as there is room for."""
        count = min(len(ids), self.room)
        self._extend(ids[:count], 1, logprobs and logprobs[:count], mask and mask[:count])

    def end_turn(self, message: Message, complete: bool) -> None:
        """Add what the policy said. A turn that is not ``complete`` calls nothing."""
        self.rollout.completion.append(message)
        self.rollout.truncated = not complete
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        self.calls = [
            Call(each["name"], each["arguments"], self.toolbox.get(each["name"]))
            for each in functions
        ]
        self.over = not complete or not self.calls

    def add_results(self, messages: list[Message], encoded: Encoded) -> None:
        """Add what the tools answered. Where it leaves no room for another turn, it is left out."""
        self.calls = []
        ids, images = encoded
        if len(ids) >= self.room:
            self.over = self.rollout.truncated = True
            return
        self.rounds += 1
        self.rollout.completion += messages
        if images is not None:
            before = self.rollout.images or ImageInputs((), (), {}, [], 0)
            self.rollout.images = before.followed(self.ids, images)
        self._extend(ids, 0, [math.nan] * len(ids), [[]] * len(ids))
        self._turn = len(self.rollout.completion_ids)

    def _extend(
        self,
        ids: list[int],
        by_policy: int,
        logprobs: list[float] | None,
        mask: list[list[int]] | None,
    ) -> None:
        rollout = self.rollout
        rollout.completion_ids += ids
        rollout.env_mask = _longer(rollout.env_mask, [by_policy] * len(ids))
        rollout.logprobs = _longer(rollout.logprobs, logprobs)
        rollout.sampling_mask = _longer(rollout.sampling_mask, mask)


def _longer(column: list[T] | None, values: list[T] | None) -> list[T] | None:
    return None if column is None or values is None else column + values


class Agents:
    """Samples completions that call tools.

    All turns of a batch go together: the engine completes every conversation that waits for it,
    then the tools answer all calls. On several processes all take part until no conversation waits
    on any of them, since some engines work for all processes at once.

    Args:
        args: budgets and the template's arguments.
        accelerator: tells how far the other processes are.
        tools: what every completion can call.
        environments: what completions act upon, with tools of their own.
        eos_token_ids: what a turn ends with.
        context: tokens that the policy has positions for; None: any number.

    Raises:
        ValueError: the chat template cannot write conversations with these tools.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        processing_class: ProcessingClass,
        tools: Toolbox,
        environments: Environments | None,
        eos_token_ids: frozenset[int],
        context: int | None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._processing_class = processing_class
        self._tokenizer = tokenizer = with_response_template(tokenizer_of(processing_class))
        self._tools = tools
        self._environments = environments
        self._eos = eos_token_ids
        self._context = context
        self._options = options("chat_template_kwargs", args.chat_template_kwargs)
        self._parser = TurnParser(tokenizer, eos_token_ids)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # in characters
        self._template = ToolTemplate(processing_class, eos_token_ids, self._options)
        for toolbox in environments.toolboxes if environments else [tools]:
            if toolbox:
                self._template.check(schemas(toolbox), self._parser)
        self._media = Media.of(args)
        self._runner = ToolRunner(self._media, args.tool_timeout)

    def sample(self, rows: list[Row], rollouts: Rollouts) -> Sampled:
        """Return one completion per row: messages, and the tokens of all turns.

        Raises:
            ValueError: a prompt is no list of messages, or too long.
        """
        talks = self._begin(rows)
        counts = [0, 0]  # calls, and those that failed
        while True:
            waiting = [talk for talk in talks if not talk.over]
            step = self._step(waiting)
            if step is None:
                break
            self._turn(waiting, step, rollouts)
            tokens = self._tokenizer.convert_ids_to_tokens(list(rollouts.sampling.suppressed))
            if isinstance(self._processing_class, ProcessorMixin):  # what its templates write
                tokens.append(self._processing_class.image_token)
            self._answer([talk for talk in waiting if talk.calls and not talk.over], counts, tokens)
        columns = {}
        if self._environments is not None:
            columns["environments"] = [talk.environment for talk in talks]
        metrics = self._metrics(len(talks), *counts)
        return Sampled([talk.rollout for talk in talks], columns, metrics)

    def _begin(self, rows: list[Row]) -> list[Conversation]:
        args = self._args
        if self._environments is None:
            pairs: list[tuple[Any, Toolbox]] = [(None, self._tools)] * len(rows)
            prompts = [row["prompt"] for row in rows]
        else:
            pairs = self._environments.take(rows)
            prompts = [
                with_images({"prompt": self._environments.reset(environment, row)}, self._media)
                for (environment, _), row in zip(pairs, rows, strict=True)
            ]
        for prompt in prompts:
            if isinstance(prompt, str):
                raise ValueError(
                    f"prompt: expected messages with tools, got the text {shortened(prompt)}"
                )
        shown = [schemas(toolbox) for _, toolbox in pairs]
        encoded = encode_prompts(
            prompts, self._processing_class, args.max_prompt_length, self._options, shown
        )
        budget = args.max_completion_length
        check_context(prompts, [each.ids for each in encoded], budget, self._context)
        nothing = [
            Rollout(prompt, ids, [], [], logprobs=[], sampling_mask=[], env_mask=[], images=images)
            for prompt, (ids, images) in zip(prompts, encoded, strict=True)
        ]
        return [
            Conversation(rollout, toolbox, budget, environment)
            for rollout, (environment, toolbox) in zip(nothing, pairs, strict=True)
        ]

    def _step(self, waiting: list[Conversation]) -> int | None:
        """Return tokens to ask for, the same on all processes; None: nothing waits on any of them.

        As many as the one with the most room has, but not beyond the policy's positions: what is
        cut by that goes on in the next step.
        """
        most = max((talk.room for talk in waiting), default=0)
        longest = max((len(talk.ids) for talk in waiting), default=0)
        if self._accelerator.num_processes > 1:
            here = torch.tensor([[most, longest]], device=self._accelerator.device)
            most, longest = self._accelerator.gather(here).amax(0).tolist()
        if most == 0:
            return None
        return most if self._context is None else min(most, self._context - longest)

    def _turn(self, waiting: list[Conversation], step: int, rollouts: Rollouts) -> None:
        """Give every conversation that waits its tokens; most of their turns end."""
        with phase("generate"):
            images = [talk.rollout.images for talk in waiting]
            drawn = rollouts.generate([talk.ids for talk in waiting], step, images)
        for index, talk in enumerate(waiting):
            ids = drawn.token_ids[index]
            logprobs = None if drawn.logprobs is None else drawn.logprobs[index]
            mask = None if drawn.sampling_mask is None else drawn.sampling_mask[index]
            talk.add_tokens(ids, logprobs, mask)
            ended = talk.ids[-1] in self._eos
            # an engine that stops by itself, as at a stop string, has ended the turn too
            if ended or talk.room == 0 or len(ids) < step:
                tools = schemas(talk.toolbox)
                message = self._parser.parse(talk.turn_ids, talk.turn_prefix, tools)
                talk.end_turn(message, complete=ended)

    def _answer(self, talks: list[Conversation], counts: list[int], images: list[str]) -> None:
        """Give every conversation what its calls return, in which no token stands for images."""
        most = self._args.max_tool_calling_iterations
        for talk in talks:
            talk.over = most is not None and talk.rounds >= most
        talks = [talk for talk in talks if not talk.over]
        outcomes = iter(self._runner.run([call for talk in talks for call in talk.calls]))
        for talk in talks:
            answered = [(call, next(outcomes).without(images)) for call in talk.calls]
            counts[0] += len(answered)
            counts[1] += sum(outcome.failed for _, outcome in answered)
            if self._environments is not None and any(each.timed_out for _, each in answered):
                self._environments.drop(talk.environment)
            messages = self._messages(talk, answered)
            end, tools = talk.ids[-1], schemas(talk.toolbox)
            talk.add_results(messages, self._template.results(messages, tools, end))

    def _messages(self, talk: Conversation, answered: list[tuple[Call, Outcome]]) -> list[Message]:
        """Return the answers, cut where they are more than there is room for, however they are
        split: nobody has to wait for the tokens of a book."""
        left = talk.room * self._longest_token
        messages = []
        for call, outcome in answered:
            parts: list[Any] = []
            for part in outcome.parts:
                if isinstance(part, str):
                    part = part[:left]
                    left -= len(part)
                parts.append(part)
            messages.append(result_message(call.name, parts))
        return messages

    def _metrics(self, completions: int, calls: int, failures: int) -> Metrics:
        """Return calls per completion, and failures per call."""
        sums = torch.tensor([calls, completions, failures, calls], dtype=torch.float64)
        per_completion, per_call = sums.to(self._accelerator.device).view(2, 2)
        return Metrics(
            {
                "tools/call_frequency": Stat("mean", *per_completion),
                "tools/failure_frequency": Stat("mean", *per_call),
            }
        )
