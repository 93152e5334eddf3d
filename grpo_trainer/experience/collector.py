"""The steps from prompts to micro-batches: draw, generate, score, compare, slice."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_trainer.agents import TurnParser
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import (
    Encoded,
    MicroBatch,
    ProcessingClass,
    PromptStream,
    Row,
    Sample,
    check_context,
    collate,
    encode_prompts,
    has_images,
    repeated,
    tokenizer_of,
)
from grpo_trainer.engines import Completions, Sampled, Sampler, Source, pad_token_id
from grpo_trainer.experience.advantages import (
    AdvantageFunction,
    Advantages,
    advantages_by,
    compute_advantages,
    taken_by,
)
from grpo_trainer.experience.curriculum import Curriculum
from grpo_trainer.experience.reader import RowReader, share
from grpo_trainer.monitor import phase

# (inputs, prompts, completions, completion_ids_list) -> (N, F) rewards of all processes
RewardCalculation: TypeAlias = Callable[[list[Row], list[Any], list[Any], list[list[int]]], Tensor]


class Scored(NamedTuple):
    """n completions of this process, and what all N completions of all processes were worth."""

    samples: list[Sample]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    compared: Advantages  # of N completions
    num_tokens: Tensor  # () of prompts and completions, all processes'


class Begun(NamedTuple):
    """What an engine has generated while the policy trained on the batch before."""

    encoded: list[Encoded]
    completions: Completions


class Collector:
    """Makes experience from rows of the dataset, ``{"prompt": ..., other columns}``.

    Args:
        args: sampling, reward and loss settings.
        accelerator: joins groups that are spread over processes.
        processing_class: the tokenizer of the policy, or its processor.
        sampler: samples the completions.
        rewards: how many reward functions there are.
        context: tokens that the policy has positions for; None: any number.
        source: makes the completions; None: one call of ``sampler`` does.
        advantages: in place of :func:`compute_advantages` with the settings of ``args``.

    Raises:
        ValueError: there is not one weight per reward function, no token ends a completion, none
            can fill up, or ``advantages`` cannot be called or excludes a setting.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        processing_class: ProcessingClass,
        sampler: Sampler,
        rewards: int,
        context: int | None = None,
        source: Source | None = None,
        advantages: AdvantageFunction | None = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._processing_class = processing_class
        self._sampler = sampler
        self._reader = RowReader(args, accelerator)
        self.read = self._reader.read
        self._context = context
        self._source = source
        self._advantages = advantages
        self._taken = [] if advantages is None else taken_by(advantages)
        for name in ("scale_rewards", "multi_objective_aggregation"):
            default, value = getattr(GRPOConfig, name), getattr(args, name)
            if advantages is not None and value != default:
                raise ValueError(
                    f"{name}: expected {default!r} with advantages, a function that compares "
                    f"completions by itself, got {value!r}"
                )
        weights = args.reward_weights or [1.0] * rewards
        if len(weights) != rewards:
            raise ValueError(
                f"reward_weights: expected {rewards} values, one per reward function, "
                f"got {len(weights)}"
            )
        self.weights = torch.tensor(weights, device=accelerator.device)
        if not sampler.eos_token_ids:
            raise ValueError(
                "processing_class: expected an eos_token (or an eos_token_id in the model's "
                "generation_config or in generation_kwargs), got none, so that no completion "
                "would end"
            )
        tokenizer = tokenizer_of(processing_class)
        self._padding = pad_token_id(tokenizer)
        self._parser = TurnParser(tokenizer, sampler.eos_token_ids)

    def draw(self, prompts: PromptStream | Curriculum, count: int) -> list[Row]:
        """Return this process's rows of the next ``count`` prompts, a group for each."""
        rows = list(repeated(self._reader.draw(prompts, count), self._args.num_generations))
        return rows[share(len(rows), self._accelerator)]

    def encode(self, rows: list[Row]) -> list[Encoded]:
        """Return the prompts of ``rows``, which have their images open, as the policy takes them.

        Raises:
            ValueError: one cannot be encoded, or leaves no room for a completion.
        """
        args = self._args
        prompts = [row["prompt"] for row in rows]
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        encoded = encode_prompts(prompts, self._processing_class, args.max_prompt_length, template)
        ids = [prompt.ids for prompt in encoded]
        check_context(prompts, ids, args.max_completion_length, self._context)
        return encoded

    def generate(self, rows: list[Row], begun: Begun | None = None) -> Sampled:
        """Return one completion per row, as :meth:`read` returns them; ``begun`` has them already.

        Raises:
            ValueError: a prompt cannot be encoded, or the engine returned something else.
        """
        if self._source is not None:
            with phase("generate"):
                return self._source.sample(rows, self._sampler)
        encoded, completions = begun or (self.encode(rows), None)
        prompts = [row["prompt"] for row in rows]
        prompt_ids, images = map(list, zip(*encoded, strict=True))
        if completions is None:
            with phase("generate"):
                completions = self._sampler.generate(prompt_ids, images=images)
        ids = completions.token_ids
        texts = self._parser.completions(prompts, prompt_ids, ids)
        samples = [Sample(*parts) for parts in zip(prompts, prompt_ids, texts, ids, strict=True)]
        for index, sample in enumerate(samples):
            sample.images = images[index]
            sample.truncated = ids[index][-1] not in self._sampler.eos_token_ids
            if completions.logprobs is not None:
                sample.logprobs = completions.logprobs[index]
            if completions.sampling_mask is not None:
                sample.sampling_mask = completions.sampling_mask[index]
        return Sampled(samples)

    def score(self, rows: list[Row], sampled: Sampled, calculate: RewardCalculation) -> Tensor:
        """Return the rewards of all N completions by the F functions, (N, F) fp32.

        Args:
            rows: this process's, as :meth:`read` returns them.
            sampled: their completions.
            calculate: returns the rewards.

        Raises:
            ValueError: they are not one per completion and function.
        """
        samples, more = sampled.samples, sampled.columns
        rewards = calculate(
            [{**row, **{name: more[name][i] for name in more}} for i, row in enumerate(rows)],
            [sample.prompt for sample in samples],
            [sample.completion for sample in samples],
            [sample.completion_ids for sample in samples],
        )
        shape = (len(rows) * self._accelerator.num_processes, len(self.weights))
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"_calculate_rewards: expected a tensor of {shape}, all processes' completions by "
                f"reward functions, got {got}"
            )
        return rewards.to(self._accelerator.device, torch.float32)

    def compare(self, rewards: Tensor, samples: list[Sample], group_size: int) -> Advantages:
        """Return the advantages of all N completions, of which ``samples`` are this process's.

        Raises:
            ValueError: a function of the user's returned none.
        """
        if self._advantages is None:
            scale, aggregation = self._args.scale_rewards, self._args.multi_objective_aggregation
            return compute_advantages(rewards, self.weights, group_size, scale, aggregation)
        # each name is that of a list, and of the field of a sample without its plural
        fields = {"prompts": "prompt", "completions": "completion"}
        completions = {
            name: gather_object([getattr(sample, fields.get(name, name)) for sample in samples])
            for name in self._taken
        }
        return advantages_by(self._advantages, rewards, self.weights, group_size, completions)

    def measure(self, samples: list[Sample]) -> Tensor:  # (N, 3)
        """Return all processes' lengths of prompts and completions, and who was truncated.

        Raises:
            ValueError: some processes may run the model's part for images and others not.
        """
        measures = [
            [len(sample.prompt_ids) for sample in samples],
            [sum(sample.by_policy) for sample in samples],
            [sample.truncated for sample in samples],
            [has_images([sample.images]) for sample in samples],
        ]
        table = torch.tensor(measures, dtype=torch.float32).T
        table = self._accelerator.gather(table.to(self._accelerator.device))
        seeing = table[:, 3]
        if self._accelerator.num_processes > 1 and seeing.min() != seeing.max():
            raise ValueError(
                "images: expected in all prompts of a generation batch (with what tools answer) or "
                "in none with several processes, whose forwards go together, got them in "
                f"{int(seeing.sum())} of {len(seeing)}"
            )
        return table[:, :3]

    def slices(self, scored: Scored, count: int) -> list[MicroBatch]:
        """Deal completions to ``count`` micro-batches; several of them are shuffled first."""
        samples = scored.samples
        advantages = scored.compared.advantages[self.own(scored)]
        order = torch.randperm(len(samples)) if count > 1 else torch.arange(len(samples))
        parts = order.to(advantages.device).chunk(count)
        dealt = [[samples[i] for i in part.tolist()] for part in parts]
        counts = [sum(chain(*(sample.in_loss for sample in part))) for part in dealt]
        multiple = self._args.pad_to_multiple_of
        assert not isinstance(multiple, str)  # on construction auto became a number or None
        # what the batches divide by is averaged over the processes, as their gradients are
        local = torch.tensor(counts, dtype=torch.float64, device=self._accelerator.device)
        tokens = self._accelerator.reduce(local, "mean")
        return [
            collate(part, advantages[index], tokens.mean(), number, self._padding, multiple)
            for part, index, number in zip(dealt, parts, tokens, strict=True)
        ]

    def own(self, scored: Scored) -> slice:
        """Return which of the N completions are this process's."""
        return share(len(scored.rewards), self._accelerator)
