"""From prompts to scored micro-batches: generate, reward, compare, shuffle, slice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.data import (
    Curriculum,
    MicroBatch,
    PromptStream,
    Rollout,
    Row,
    TokenCounts,
    check_context,
    check_prompts,
    check_text,
    collate,
    encode_prompts,
    own_copy,
    repeated,
)
from grpo_trainer.experience.advantages import Advantages, compute_advantages
from grpo_trainer.experience.dynamic_sampling import DynamicSampling
from grpo_trainer.experience.overlap import Ahead, Begun
from grpo_trainer.experience.scored import RolloutColumns, Scored, rollout_metrics, share
from grpo_trainer.monitor import REWARD_PREFIX, CompletionLog, MetricLog, phase
from grpo_trainer.rewards import RewardFunction, RewardLog, score
from grpo_trainer.rollout import Rollouts, Sampled, Source, pad_token_id
from grpo_trainer.tools import TurnParser

T = TypeVar("T")

# passed to reward functions under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class Experience(NamedTuple):
    """A scored generation batch, ready for the loss."""

    batches: list[MicroBatch]
    num_tokens: int  # prompts and completions generated, all processes


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
        tokenizer: of the policy.
        rollouts: samples the completions.
        rewards: the reward functions.
        context: tokens that the policy has positions for; None: any number.
        source: makes the completions; None: one call of ``rollouts`` does.

    Raises:
        ValueError: there is not one weight per reward function, no token ends a completion, or
            none can fill up.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        rollouts: Rollouts,
        rewards: list[RewardFunction],
        context: int | None = None,
        source: Source | None = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self.rewards = rewards
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
        self._padding = pad_token_id(tokenizer)
        self._parser = TurnParser(tokenizer, rollouts.eos_token_ids)

    def train(
        self, prompts: PromptStream | Curriculum, sinks: Sinks, ahead: Ahead | None = None
    ) -> Experience:
        """The next generation batch, dealt to ``steps_per_generation`` micro-batches.

        With more than one of them the completions are shuffled first. ``ahead`` may have begun on
        the batch already; it then begins on the one after it.
        """
        args = self._args
        tokens = 0

        def sample(count: int, begun: Begun | None = None) -> Scored:
            nonlocal tokens
            rows = self._draw(prompts, count) if begun is None else begun.rows
            scored = self._sample(rows, args.num_generations, sinks, begun)
            tokens += _num_tokens(scored.columns)
            return scored

        begun = None if ahead is None else ahead.take(sinks.state, sinks.metrics)
        scored = sample(args.prompts_per_generation, begun)
        if args.dynamic_sampling:
            dynamic = DynamicSampling.from_config(args, self.weights, self._accelerator)
            scored, metrics = dynamic.fill(scored, sample)
            sinks.metrics.add(metrics)
            if ahead is not None:  # the engine was needed until now
                ahead.begin(sinks.state)
        if isinstance(prompts, Curriculum):
            totals = self._advantages(scored.rewards, args.num_generations).rewards
            prompts.rewrite(scored.rollouts, totals, args.num_generations)
        assert args.steps_per_generation is not None  # set on construction
        batches = self._slices(scored, args.num_generations, args.steps_per_generation, sinks)
        return Experience(batches, tokens)

    def ahead(self, prompts: PromptStream | Curriculum) -> Ahead:
        """Samples generation batches of ``prompts`` while the policy trains."""
        assert isinstance(prompts, PromptStream)  # a curriculum needs the batch before
        count = self._args.prompts_per_generation
        draw = partial(self._draw, prompts, count)
        return Ahead(self._args, prompts, draw, self._encode, self._rollouts)

    def evaluate(self, rows: list[Row], sinks: Sinks) -> MicroBatch:
        """One micro-batch of ``rows``, this process's. A prompt's group is consecutive, over the
        processes in order."""
        check_prompts(rows)
        size = self._args.eval_group_size
        scored = self._sample(rows, size, sinks)
        return self._slices(scored, size, 1, sinks)[0]

    def _draw(self, prompts: PromptStream | Curriculum, count: int) -> list[Row]:
        """This process's rows of the next ``count`` prompts, a group for each."""
        taken = prompts.take(count)
        check_prompts(taken)
        rows = list(repeated(taken, self._args.num_generations))
        accelerator = self._accelerator
        return rows[share(len(rows), accelerator.process_index, accelerator.num_processes)]

    def _sample(
        self, rows: list[Row], group_size: int, sinks: Sinks, begun: Begun | None = None
    ) -> Scored:
        """One scored completion per row."""
        check_text("prompt", rows)
        own = [own_copy(row) for row in rows]  # functions may keep and edit what they are given
        sampled = self._generate(own, begun)
        rollouts = sampled.rollouts
        rewards, log = self._score(own, sampled, sinks.state)  # (n, F)
        rollouts = [
            rollout._replace(
                extra={name: values[i] for name, values in log.columns.items()}, row=rows[i]
            )
            for i, rollout in enumerate(rollouts)
        ]
        everyone, columns = self._gather(rewards, rollouts)
        names = [reward.name for reward in self.rewards]
        advantages = self._advantages(everyone, group_size)
        sinks.metrics.add(rollout_metrics(names, everyone, advantages, columns))
        sinks.metrics.add(log.metrics(self._accelerator))
        sinks.metrics.add(sampled.metrics)
        return Scored(rollouts, everyone, columns)

    def _advantages(self, rewards: Tensor, group_size: int) -> Advantages:
        args = self._args
        return compute_advantages(
            rewards, self.weights, group_size, args.scale_rewards, args.multi_objective_aggregation
        )

    def _encode(self, rows: list[Row]) -> list[list[int]]:
        args = self._args
        prompts = [row["prompt"] for row in rows]
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        prompt_ids = encode_prompts(prompts, self._tokenizer, args.max_prompt_length, template)
        check_context(prompts, prompt_ids, args.max_completion_length, self._context)
        return prompt_ids

    def _generate(self, rows: list[Row], begun: Begun | None) -> Sampled:
        if self._source is not None:
            with phase("generate"):
                return self._source.sample(rows, self._rollouts)
        prompts, prompt_ids = [row["prompt"] for row in rows], self._encode(rows)
        with phase("generate"):
            found = self._rollouts.generate(prompt_ids) if begun is None else begun.completions
        completion_ids, logprobs, mask = found
        completions = self._parser.completions(prompts, prompt_ids, completion_ids)
        truncated = [ids[-1] not in self._rollouts.eos_token_ids for ids in completion_ids]
        nothing = [None] * len(prompts)
        columns = (prompts, prompt_ids, completions, completion_ids, truncated)
        optional: tuple[Sequence[Any], ...] = (logprobs or nothing, mask or nothing)
        return Sampled([Rollout(*values) for values in zip(*columns, *optional, strict=True)])

    def _score(
        self, rows: list[Row], sampled: Sampled, state: TrainerState
    ) -> tuple[Tensor, RewardLog]:  # (n, F)
        log, rollouts = RewardLog(len(rows)), sampled.rollouts
        names = [name for name in rows[0] if name not in _NOT_COLUMNS]
        columns = {name: [row[name] for row in rows] for name in names} | sampled.columns
        arguments = columns | {
            "prompts": [rollout.prompt for rollout in rollouts],
            "completions": [rollout.completion for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "trainer_state": state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        return score(self.rewards, len(rows), arguments), log

    def _gather(self, rewards: Tensor, rollouts: list[Rollout]) -> tuple[Tensor, RolloutColumns]:
        """All processes' rewards and lengths, by one gather."""
        measures = [
            [len(rollout.prompt_ids) for rollout in rollouts],
            [sum(rollout.by_policy) for rollout in rollouts],
            [rollout.truncated for rollout in rollouts],
        ]
        table = torch.cat([rewards, torch.tensor(measures, dtype=torch.float32).T], dim=1)
        everyone = self._accelerator.gather(table.to(self._accelerator.device))
        return everyone[:, :-3], RolloutColumns(*everyone[:, -3:].unbind(1))

    def _slices(
        self, scored: Scored, group_size: int, slices: int, sinks: Sinks
    ) -> list[MicroBatch]:
        args, accelerator = self._args, self._accelerator
        rollouts = scored.rollouts
        advantages = self._advantages(scored.rewards, group_size)
        total = len(scored.columns.truncated)
        mine = share(total, accelerator.process_index, accelerator.num_processes)
        values = advantages.advantages[mine]
        if sinks.completions is not None:
            names = [f"{REWARD_PREFIX}{reward.name}" for reward in self.rewards]
            columns = dict(zip(names, scored.rewards[mine].T.tolist(), strict=True))
            totals = advantages.rewards[mine].tolist()
            columns |= {"reward": totals, "advantage": values.tolist()}
            sinks.completions.add(rollouts, columns)
        masked = args.mask_truncated_completions
        in_loss = [
            [0] * len(rollout.completion_ids) if masked and rollout.truncated else rollout.by_policy
            for rollout in rollouts
        ]
        order = torch.randperm(len(rollouts)) if slices > 1 else torch.arange(len(rollouts))
        parts = [part.tolist() for part in order.chunk(slices)]
        counts = [sum(sum(in_loss[i]) for i in part) for part in parts]
        # what the batches divide by is averaged over the processes, as their gradients are
        local = torch.tensor(counts, dtype=torch.float64, device=accelerator.device)
        tokens = accelerator.reduce(local, "mean")
        return [
            collate(
                [rollouts[i].prompt_ids for i in part],
                [rollouts[i].completion_ids for i in part],
                [in_loss[i] for i in part],
                values[torch.tensor(part, device=values.device)],
                TokenCounts(tokens.mean(), count),
                self._padding,
                args.pad_to_multiple_of,
                _reported(rollouts[i].logprobs for i in part),
                _reported(rollouts[i].sampling_mask for i in part),
            )
            for part, count in zip(parts, tokens, strict=True)
        ]


def _reported(column: Iterable[T | None]) -> list[T] | None:
    """What the engine says of each completion, if it does."""
    found = list(column)
    return None if any(row is None for row in found) else found  # type: ignore[return-value]


def _num_tokens(columns: RolloutColumns) -> int:
    return int(columns.prompt_lengths.sum() + columns.completion_lengths.sum())
