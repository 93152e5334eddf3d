"""From prompts to scored micro-batches: generate, reward, compare, shuffle, slice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerState

from grpo_trainer.agents import TurnParser
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import (
    Encoded,
    MicroBatch,
    ProcessingClass,
    PromptStream,
    Rollout,
    Row,
    check_context,
    check_prompts,
    collate,
    encode_prompts,
    has_images,
    own_copy,
    repeated,
    tokenizer_of,
)
from grpo_trainer.engines import Completions, Rollouts, Sampled, Source, pad_token_id
from grpo_trainer.experience.advantages import (
    Advantages,
    Scored,
    compute_advantages,
    rollout_metrics,
    share,
)
from grpo_trainer.experience.curriculum import Curriculum
from grpo_trainer.experience.dynamic_sampling import DynamicSampling
from grpo_trainer.experience.overlap import Ahead
from grpo_trainer.experience.reader import RowReader
from grpo_trainer.monitor import REWARD_PREFIX, CompletionLog, MetricLog, phase
from grpo_trainer.rewards import RewardFunction, RewardLog, score

# (inputs, prompts, completions, completion_ids_list) -> (N, F) rewards of all processes
RewardCalculation: TypeAlias = Callable[[list[Row], list[Any], list[Any], list[list[int]]], Tensor]
# passed to reward functions under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class Scorer:
    """Scores the completions of this process, and joins the rewards of all.

    Args:
        rewards: the reward functions.
        calculate: in place of :meth:`calculate_rewards`, with its arguments.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        rewards: list[RewardFunction],
        calculate: RewardCalculation | None = None,
    ) -> None:
        self._accelerator = accelerator
        self.rewards = rewards
        self._calculate = calculate or self.calculate_rewards

    def calculate_rewards(
        self,
        inputs: list[Row],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> Tensor:  # (N, F)
        """Return what each reward function says of the completions of all N processes' prompts.

        Args:
            inputs: this process's rows, one per completion; functions get their columns.
            prompts, completions, completion_ids_list: this process's.
        """
        state, log = self._asked
        names = [name for name in inputs[0] if name not in _NOT_COLUMNS]
        arguments: dict[str, Any] = {name: [row[name] for row in inputs] for name in names}
        arguments |= {
            "prompts": prompts,
            "completions": completions,
            "completion_ids": completion_ids_list,
            "trainer_state": state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        rewards = score(self.rewards, len(inputs), arguments)
        return self._accelerator.gather(rewards.to(self._accelerator.device))

    def score(
        self, rows: list[Row], sampled: Sampled, state: TrainerState
    ) -> tuple[Tensor, RewardLog]:  # (N, F)
        """Return the rewards of all processes, and what functions logged of this one's.

        Raises:
            ValueError: they are not one per completion and function.
        """
        rollouts, more = sampled.rollouts, sampled.columns
        log = RewardLog(len(rows))
        self._asked = state, log
        rewards = self._calculate(
            [{**row, **{name: more[name][i] for name in more}} for i, row in enumerate(rows)],
            [rollout.prompt for rollout in rollouts],
            [rollout.completion for rollout in rollouts],
            [rollout.completion_ids for rollout in rollouts],
        )
        shape = (len(rows) * self._accelerator.num_processes, len(self.rewards))
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"_calculate_rewards: expected a tensor of {shape}, all processes' completions by "
                f"reward functions, got {got}"
            )
        return rewards.to(self._accelerator.device, torch.float32), log


class Sinks(NamedTuple):
    """Where the numbers go, and what the trainer's state is."""

    state: TrainerState
    metrics: MetricLog
    completions: CompletionLog | None = None


class Collector:
    """Makes experience from rows of the dataset, ``{"prompt": ..., other columns}``.

    Args:
        args: sampling, reward and loss settings.
        accelerator: joins groups that are spread over processes.
        processing_class: the tokenizer of the policy, or its processor.
        rollouts: samples the completions.
        rewards: the reward functions.
        context: tokens that the policy has positions for; None: any number.
        source: makes the completions; None: one call of ``rollouts`` does.
        calculate_rewards: in place of that of :class:`Scorer`.

    Raises:
        ValueError: there is not one weight per reward function, no token ends a completion, or
            none can fill up.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        processing_class: ProcessingClass,
        rollouts: Rollouts,
        rewards: list[RewardFunction],
        context: int | None = None,
        source: Source | None = None,
        calculate_rewards: RewardCalculation | None = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._processing_class = processing_class
        self._rollouts = rollouts
        self._reader = RowReader(args, accelerator)
        self.scorer = Scorer(accelerator, rewards, calculate_rewards)
        self._context = context
        self._source = source
        weights = args.reward_weights or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(
                f"reward_weights: expected {len(rewards)} values, one per reward function, "
                f"got {len(weights)}"
            )
        self.weights = torch.tensor(weights, device=accelerator.device)
        if not rollouts.eos_token_ids:
            raise ValueError(
                "processing_class: expected an eos_token (or an eos_token_id in the model's "
                "generation_config or in generation_kwargs), got none, so that no completion "
                "would end"
            )
        tokenizer = tokenizer_of(processing_class)
        self._padding = pad_token_id(tokenizer)
        self._parser = TurnParser(tokenizer, rollouts.eos_token_ids)

    def train(
        self, prompts: PromptStream | Curriculum, sinks: Sinks, ahead: Ahead | None = None
    ) -> tuple[list[MicroBatch], int]:
        """Return the next generation batch, dealt to ``steps_per_generation`` micro-batches, and
        how many tokens all processes have prompted and generated for it.

        With more than one micro-batch the completions are shuffled first. ``ahead`` may have begun
        on the batch already; it then begins on the one after it.
        """
        args = self._args
        rows, completions = (
            (self._draw(prompts, args.prompts_per_generation), None)
            if ahead is None
            else ahead.take(sinks.state, sinks.metrics)
        )
        scored = self._sample(rows, args.num_generations, sinks, completions)
        if args.dynamic_sampling:

            def more(count: int) -> Scored:
                return self._sample(self._draw(prompts, count), args.num_generations, sinks)

            compare = partial(self._compared, group_size=args.num_generations)
            dynamic = DynamicSampling(args=args, accelerator=self._accelerator, compare=compare)
            scored, metrics = dynamic.fill(scored, more)
            sinks.metrics.add(metrics)
            if ahead is not None:  # the engine was needed until now
                ahead.begin(sinks.state)
        if isinstance(prompts, Curriculum):
            prompts.rewrite(scored.rollouts, scored.compared.rewards, args.num_generations)
        assert args.steps_per_generation is not None  # set on construction
        return self._slices(scored, args.steps_per_generation, sinks), int(scored.num_tokens)

    def ahead(self, prompts: PromptStream | Curriculum) -> Ahead:
        """Return what samples generation batches of ``prompts`` while the policy trains."""
        assert isinstance(prompts, PromptStream)  # a curriculum needs the batch before
        count = self._args.prompts_per_generation
        draw = partial(self._draw, prompts, count)

        def encode(rows: list[Row]) -> list[Encoded]:
            return self._encode(self._reader.read(rows))

        return Ahead(self._args, prompts, draw, encode, self._rollouts)

    def evaluate(self, rows: list[Row], sinks: Sinks) -> MicroBatch:
        """Return one micro-batch of ``rows``, this process's.

        A prompt's group is consecutive, over the processes in order.
        """
        check_prompts(rows)
        scored = self._sample(rows, self._args.eval_group_size, sinks)
        return self._slices(scored, 1, sinks)[0]

    def _draw(self, prompts: PromptStream | Curriculum, count: int) -> list[Row]:
        """Return this process's rows of the next ``count`` prompts, a group for each."""
        taken = self._reader.draw(prompts, count)
        rows = list(repeated(taken, self._args.num_generations))
        return rows[share(len(rows), self._accelerator)]

    def _sample(
        self,
        rows: list[Row],
        group_size: int,
        sinks: Sinks,
        completions: Completions | None = None,
    ) -> Scored:
        """Return one scored completion per row; ``completions`` may be there already."""
        # functions may keep and edit what they are given
        own = [own_copy(row) for row in self._reader.read(rows)]
        sampled = self._generate(own, completions)
        rewards, log = self.scorer.score(own, sampled, sinks.state)  # (N, F)
        for index, rollout in enumerate(sampled.rollouts):
            rollout.row = rows[index]
            rollout.extra = {name: values[index] for name, values in log.columns.items()}
            rollout.left_out = self._args.mask_truncated_completions and rollout.truncated
        prompts, lengths, truncated, seeing = self._measured(sampled.rollouts).unbind(1)
        self._check_together(seeing)
        scored = Scored(
            rollouts=sampled.rollouts,
            rewards=rewards,
            compared=self._compared(rewards, group_size),
            num_tokens=prompts.sum() + lengths.sum(),
        )
        names = [reward.name for reward in self.scorer.rewards]
        sinks.metrics.add(rollout_metrics(names, scored, lengths, truncated))
        sinks.metrics.add(log.metrics(self._accelerator))
        sinks.metrics.add(sampled.metrics)
        return scored

    def _compared(self, rewards: Tensor, group_size: int) -> Advantages:
        args = self._args
        return compute_advantages(
            rewards, self.weights, group_size, args.scale_rewards, args.multi_objective_aggregation
        )

    def _encode(self, rows: list[Row]) -> list[Encoded]:
        args = self._args
        prompts = [row["prompt"] for row in rows]
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        encoded = encode_prompts(prompts, self._processing_class, args.max_prompt_length, template)
        ids = [prompt.ids for prompt in encoded]
        check_context(prompts, ids, args.max_completion_length, self._context)
        return encoded

    def _generate(self, rows: list[Row], found: Completions | None) -> Sampled:
        if self._source is not None:
            with phase("generate"):
                return self._source.sample(rows, self._rollouts)
        prompts, encoded = [row["prompt"] for row in rows], self._encode(rows)
        prompt_ids, images = map(list, zip(*encoded, strict=True))
        if found is None:
            with phase("generate"):
                found = self._rollouts.generate(prompt_ids, images=images)
        ids = found.token_ids
        texts = self._parser.completions(prompts, prompt_ids, ids)
        rollouts = [Rollout(*made) for made in zip(prompts, prompt_ids, texts, ids, strict=True)]
        for index, rollout in enumerate(rollouts):
            rollout.images = images[index]
            rollout.truncated = ids[index][-1] not in self._rollouts.eos_token_ids
            if found.logprobs is not None:
                rollout.logprobs = found.logprobs[index]
            if found.sampling_mask is not None:
                rollout.sampling_mask = found.sampling_mask[index]
        return Sampled(rollouts)

    def _measured(self, rollouts: list[Rollout]) -> Tensor:  # (N, 4)
        """Join all processes' lengths, who was truncated, and who saw images, by one gather."""
        measures = [
            [len(rollout.prompt_ids) for rollout in rollouts],
            [sum(rollout.by_policy) for rollout in rollouts],
            [rollout.truncated for rollout in rollouts],
            [has_images([rollout.images]) for rollout in rollouts],
        ]
        table = torch.tensor(measures, dtype=torch.float32).T
        return self._accelerator.gather(table.to(self._accelerator.device))

    def _check_together(self, seeing: Tensor) -> None:  # (N,) 1: the prompt has images
        """Raise ValueError if some processes may run the model's part for images and others not."""
        if self._accelerator.num_processes == 1 or seeing.min() == seeing.max():
            return
        raise ValueError(
            "images: expected in all prompts of a generation batch (with what tools answer) or in "
            f"none with several processes, whose forwards go together, got them in "
            f"{int(seeing.sum())} of {len(seeing)}"
        )

    def _slices(self, scored: Scored, slices: int, sinks: Sinks) -> list[MicroBatch]:
        accelerator, rollouts, compared = self._accelerator, scored.rollouts, scored.compared
        mine = share(len(scored.rewards), accelerator)
        advantages = compared.advantages[mine]
        if sinks.completions is not None:
            names = [f"{REWARD_PREFIX}{reward.name}" for reward in self.scorer.rewards]
            columns = dict(zip(names, scored.rewards[mine].T.tolist(), strict=True))
            totals = compared.rewards[mine].tolist()
            columns |= {"reward": totals, "advantage": advantages.tolist()}
            sinks.completions.add(rollouts, columns)
        order = torch.randperm(len(rollouts)) if slices > 1 else torch.arange(len(rollouts))
        parts = order.to(advantages.device).chunk(slices)
        dealt = [[rollouts[i] for i in part.tolist()] for part in parts]
        counts = [sum(sum(rollout.in_loss) for rollout in part) for part in dealt]
        multiple = self._args.pad_to_multiple_of
        assert not isinstance(multiple, str)  # on construction auto became a number or None
        # what the batches divide by is averaged over the processes, as their gradients are
        local = torch.tensor(counts, dtype=torch.float64, device=accelerator.device)
        tokens = accelerator.reduce(local, "mean")
        return [
            collate(
                part,
                advantages[index],
                tokens.mean(),
                count,
                self._padding,
                multiple,
            )
            for part, index, count in zip(dealt, parts, tokens, strict=True)
        ]
