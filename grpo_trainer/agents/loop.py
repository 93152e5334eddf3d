"""Completions in several turns: the policy writes, its tools answer, it goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import ProcessorMixin

from grpo_kernels.losses import Metrics
from grpo_trainer.agents.parse import Message, TurnParser
from grpo_trainer.agents.template import ToolTemplate, result_message
from grpo_trainer.agents.tools import Call, Environments, Outcome, Toolbox, answer, schemas
from grpo_trainer.common import shortened
from grpo_trainer.config import options
from grpo_trainer.data import Encoded, ImageInputs, Media, Sample
from grpo_trainer.engines import Sampler, image_token_ids
from grpo_trainer.monitor import phase, value_metric


@dataclass
class Conversation:
    """One prompt and what the policy and its tools have added so far."""

    sample: Sample
    environment: Any  # what its tools act upon; None: there is none
    toolbox: Toolbox  # what the policy can call
    budget: int  # tokens for the whole completion, results of tools included
    calls: list[Call] = field(default_factory=list)  # of the last turn, not answered yet
    rounds: int = 0  # of calls that were answered
    over: bool = False
    turn: int = 0  # where in the completion the current turn begins

    @property
    def ids(self) -> list[int]:
        """What the policy reads next."""
        return self.sample.prompt_ids + self.sample.completion_ids

    @property
    def room(self) -> int:
        """Tokens left."""
        return self.budget - len(self.sample.completion_ids)

    def add(
        self,
        ids: list[int],
        by_policy: int,
        logprobs: list[float] | None,
        sampling_mask: list[list[int]] | None,
    ) -> None:
        """Add tokens, as many as there is room for."""
        count, sample = min(len(ids), self.room), self.sample
        sample.completion_ids += ids[:count]
        env_mask = [by_policy] * count
        columns = {"env_mask": env_mask, "logprobs": logprobs, "sampling_mask": sampling_mask}
        for name, values in columns.items():
            column = getattr(sample, name)
            whole = None if column is None or values is None else column + values[:count]
            setattr(sample, name, whole)

    def end_turn(self, message: Message, complete: bool) -> None:
        """Add what the policy said. A turn that is not ``complete`` calls nothing."""
        self.sample.completion.append(message)
        self.sample.truncated = not complete
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        self.calls = [Call.of(self.toolbox, **function) for function in functions]
        self.over = not complete or not self.calls

    def add_results(self, messages: list[Message], whole: Encoded, start: int) -> None:
        """Add what the tools answered, what ``whole`` has behind its first ``start`` tokens. Where
        it leaves no room for another turn, it is left out."""
        self.calls = []
        ids = whole.ids[start:]
        if len(ids) >= self.room:
            self.over = self.sample.truncated = True
            return
        self.rounds += 1
        self.sample.completion += messages
        if whole.images is not None:
            before = self.sample.images or ImageInputs((), {}, [], 0)
            self.sample.images = before.followed(self.ids, whole.images, start)
        self.add(ids, 0, [math.nan] * len(ids), [[]] * len(ids))
        self.turn = len(self.sample.completion_ids)


@dataclass(eq=False)
class ToolLoop:
    """Samples completions that call tools.

    All turns of a batch go together: the engine completes every conversation that waits for it,
    then the tools answer all calls. On several processes all take part until no conversation waits
    on any of them, since some engines work for all processes at once.

    Args:
        sampler: samples turns.
        tools: what every completion can call.
        environments: what completions act upon, with tools of their own.

    Raises:
        ValueError: the chat template cannot write conversations with these tools.
    """

    sampler: Sampler
    tools: Toolbox
    environments: Environments | None

    def __post_init__(self) -> None:
        self._context = context = self.sampler.context
        eos = self.sampler.eos_token_ids
        tokenizer = context.tokenizer
        self._parser = TurnParser(tokenizer, eos, families=True)
        self._longest_token = max(map(len, tokenizer.get_vocab()))  # in characters
        template = options("chat_template_kwargs", context.args.chat_template_kwargs)
        self._template = ToolTemplate(context.processing_class, eos, template)
        for toolbox in self.environments.toolboxes if self.environments else [self.tools]:
            if toolbox:
                self._template.check(schemas(toolbox), self._parser)
        of_images = image_token_ids(context.policy())
        self._places = tokenizer.convert_ids_to_tokens(list(of_images))
        if isinstance(context.processing_class, ProcessorMixin):  # what its templates write
            self._places.append(context.processing_class.image_token)

    def __call__(self, samples: list[Sample]) -> Metrics:
        """Complete samples by messages, and the tokens of all turns.

        Raises:
            ValueError: a prompt is no list of messages, or too long.
        """
        talks = self._begin(samples)
        outcomes: list[Outcome] = []
        waiting = talks
        while (step := self._step(waiting)) is not None:
            self._turn(waiting, step)
            outcomes += self._answer([talk for talk in waiting if talk.calls and not talk.over])
            waiting = [talk for talk in talks if not talk.over]
        calls, failures = len(outcomes), sum(outcome.failed for outcome in outcomes)
        device = self._context.accelerator.device
        per_completion = value_metric("tools/call_frequency", calls, device, len(talks))
        per_call = value_metric("tools/failure_frequency", failures, device, calls)
        return Metrics.merge([per_completion, per_call])

    def _begin(self, samples: list[Sample]) -> list[Conversation]:
        pairs: list[tuple[Any, Toolbox]] = [(None, self.tools)] * len(samples)
        if self.environments is not None:
            pairs, media = self.environments.take(samples), Media.of(self._context.args)
            for sample, (environment, _) in zip(samples, pairs, strict=True):
                sample.prompt = self.environments.reset(environment, sample.inputs, media)
                sample.inputs["environments"] = environment
        for sample in samples:
            if isinstance(sample.prompt, str):
                raise ValueError(
                    f"prompt: expected messages with tools, got the text {shortened(sample.prompt)}"
                )
            sample.completion, sample.env_mask = [], []
            sample.logprobs, sample.sampling_mask = [], []
        self._context.encode(samples, [schemas(toolbox) for _, toolbox in pairs])
        budget = self._context.args.max_completion_length
        return [
            Conversation(sample, *pair, budget) for sample, pair in zip(samples, pairs, strict=True)
        ]

    def _step(self, waiting: list[Conversation]) -> int | None:
        """Return tokens to ask for, the same on all processes; None: nothing waits on any of them.

        As many as the one with the most room has, but not beyond the policy's positions: what is
        cut by that goes on in the next step.
        """
        most = max((talk.room for talk in waiting), default=0)
        longest = max((len(talk.ids) for talk in waiting), default=0)
        accelerator, positions = self._context.accelerator, self._context.positions
        if accelerator.num_processes > 1:
            here = torch.tensor([[most, longest]], device=accelerator.device)
            most, longest = accelerator.gather(here).amax(0).tolist()
        if most == 0:
            return None
        return most if positions is None else min(most, positions - longest)

    def _turn(self, waiting: list[Conversation], step: int) -> None:
        """Give every conversation that waits its tokens; most of their turns end."""
        with phase("generate"):
            images = [talk.sample.images for talk in waiting]
            turns = self.sampler.generate([talk.ids for talk in waiting], step, images)
        for talk, (ids, logprobs, mask) in zip(waiting, turns.rows(), strict=True):
            talk.add(ids, 1, logprobs, mask)
            so_far, start = talk.ids, len(talk.sample.prompt_ids) + talk.turn
            ended = so_far[-1] in self.sampler.eos_token_ids
            # an engine that stops by itself, as at a stop string, has ended the turn too
            if ended or talk.room == 0 or len(ids) < step:
                tools = schemas(talk.toolbox)
                message = self._parser.parse(so_far[start:], so_far[:start], tools)
                talk.end_turn(message, complete=ended)

    def _answer(self, talks: list[Conversation]) -> list[Outcome]:
        """Give every conversation what its calls return."""
        most = self._context.args.max_tool_calling_iterations
        for talk in talks:
            talk.over = most is not None and talk.rounds >= most
        talks = [talk for talk in talks if not talk.over]
        calls = [call for talk in talks for call in talk.calls]
        outcomes = answer(calls, self._places, self._context.args.tool_timeout)
        answers = iter(outcomes)
        for talk in talks:
            # cut where they are more than there is room for, however they are split: nobody has to
            # wait for the tokens of a book
            left = talk.room * self._longest_token
            messages = []
            for call in talk.calls:
                outcome = next(answers)
                blocks = [
                    block | {"text": block["text"][:left]} if "text" in block else block
                    for block in outcome.blocks
                ]
                left -= min(left, sum(len(block.get("text", "")) for block in blocks))
                messages.append(result_message(call.name, blocks))
                if outcome.timed_out and self.environments is not None:
                    self.environments.drop(talk.environment)
            end, tools = talk.ids[-1], schemas(talk.toolbox)
            talk.add_results(messages, *self._template.results(messages, tools, end))
        return outcomes
