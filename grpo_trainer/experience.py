"""From prompts to scored micro-batches: generate, reward, compare, shuffle, slice."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo_trainer.advantages import Advantages, compute_advantages, groups_with_signal
from grpo_trainer.completions import CompletionLog
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.dynamic import DynamicSampling
from grpo_trainer.metrics import MetricLog, RolloutColumns, rollout_metrics
from grpo_trainer.microbatch import MicroBatch, TokenCounts, collate
from grpo_trainer.prompts import check_context, decode_completions, encode_prompts
from grpo_trainer.rewards import RewardFunction, RewardLog, score
from grpo_trainer.rollout import Rollouts
from grpo_trainer.rollout.transformers import pad_token_id
from grpo_trainer.sampling import PromptStream, Row, repeated
from grpo_trainer.scored import Rollout, Scored, share

logger = logging.getLogger(__name__)

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

    Raises:
        ValueError: there is not one weight per reward function, or no token ends a completion.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        rollouts: Rollouts,
        rewards: list[RewardFunction],
        context: int | None = None,
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._rollouts = rollouts
        self._rewards = rewards
        self._context = context
        weights = args.reward_weights or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(
                f"reward_weights: expected {len(rewards)} values, one per reward function, "
                f"got {len(weights)}"
            )
        self._weights = torch.tensor(weights, device=accelerator.device)
        if not rollouts.eos_token_ids:
            raise ValueError(
                "processing_class: expected an eos_token (or generation_kwargs with an "
                "eos_token_id), got none, so that no completion would end"
            )

    def train(self, prompts: PromptStream, sinks: Sinks) -> Experience:
        """The next generation batch, dealt to ``steps_per_generation`` micro-batches.

        With more than one of them the completions are shuffled first.
        """
        args = self._args
        tokens = 0

        def sample(count: int) -> Scored:
            nonlocal tokens
            rows = list(repeated(prompts.take(count), args.num_generations))
            accelerator = self._accelerator
            mine = share(len(rows), accelerator.process_index, accelerator.num_processes)
            scored = self._sample(rows[mine], args.num_generations, sinks)
            tokens += _num_tokens(scored.columns)
            return scored

        scored = sample(args.prompts_per_generation)
        if args.dynamic_sampling:
            scored, metrics = self._dynamic().fill(scored, sample)
            sinks.metrics.add(metrics)
        assert args.steps_per_generation is not None  # set on construction
        batches = self._slices(scored, args.num_generations, args.steps_per_generation, sinks)
        return Experience(batches, tokens)

    def evaluate(self, rows: list[Row], sinks: Sinks) -> MicroBatch:
        """One micro-batch of ``rows``, this process's. A prompt's group is consecutive, over the
        processes in order."""
        size = self._args.eval_group_size
        scored = self._sample(rows, size, sinks)
        return self._slices(scored, size, 1, sinks)[0]

    def _dynamic(self) -> DynamicSampling:
        args = self._args

        def has_signal(rewards: Tensor) -> Tensor:
            aggregation = args.multi_objective_aggregation
            return groups_with_signal(rewards, self._weights, args.num_generations, aggregation)

        return DynamicSampling(
            max_rounds=args.max_resampling_rounds,
            group_size=args.num_generations,
            has_signal=has_signal,
            accelerator=self._accelerator,
        )

    def _sample(self, rows: list[Row], group_size: int, sinks: Sinks) -> Scored:
        """One scored completion per row."""
        rollouts = self._generate(rows)
        rewards, log = self._score(rows, rollouts, sinks.state)  # (n, F)
        rollouts = [
            rollout._replace(extra={name: values[i] for name, values in log.columns.items()})
            for i, rollout in enumerate(rollouts)
        ]
        everyone, columns = self._gather(rewards, rollouts)
        names = [reward.name for reward in self._rewards]
        advantages = self._advantages(everyone, group_size)
        sinks.metrics.add(rollout_metrics(names, everyone, advantages, columns))
        sinks.metrics.add(log.metrics(self._accelerator))
        return Scored(rollouts, everyone, columns)

    def _advantages(self, rewards: Tensor, group_size: int) -> Advantages:
        args = self._args
        return compute_advantages(
            rewards, self._weights, group_size, args.scale_rewards, args.multi_objective_aggregation
        )

    def _generate(self, rows: list[Row]) -> list[Rollout]:
        args = self._args
        prompts = [row["prompt"] for row in rows]
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        prompt_ids = encode_prompts(prompts, self._tokenizer, args.max_prompt_length, template)
        check_context(prompts, prompt_ids, args.max_completion_length, self._context)
        completion_ids, logprobs = self._rollouts.generate(prompt_ids)
        completions = decode_completions(completion_ids, prompts, self._tokenizer)
        truncated = [ids[-1] not in self._rollouts.eos_token_ids for ids in completion_ids]
        reported: Sequence[list[float] | None] = logprobs or [None] * len(prompts)
        columns = (prompts, prompt_ids, completions, completion_ids, truncated, reported)
        return [Rollout(*values) for values in zip(*columns, strict=True)]

    def _score(
        self, rows: list[Row], rollouts: list[Rollout], state: TrainerState
    ) -> tuple[Tensor, RewardLog]:  # (n, F)
        log = RewardLog(len(rows))
        names = [name for name in rows[0] if name not in _NOT_COLUMNS]
        arguments = {name: [row[name] for row in rows] for name in names} | {
            "prompts": [rollout.prompt for rollout in rollouts],
            "completions": [rollout.completion for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "trainer_state": state,
            "log_extra": log.log_extra,
            "log_metric": log.log_metric,
        }
        rewards = score(self._rewards, len(rows), arguments)
        unscored = rewards.isnan().all(1).nonzero().flatten().tolist()
        if unscored:
            logger.warning(
                "every reward function returned None for %d of %d completions, which get "
                "advantage 0; the first prompt is %r",
                len(unscored),
                len(rows),
                rollouts[unscored[0]].prompt,
            )
        return rewards, log

    def _gather(self, rewards: Tensor, rollouts: list[Rollout]) -> tuple[Tensor, RolloutColumns]:
        """All processes' rewards and lengths, by one gather."""
        measures = [
            [len(rollout.prompt_ids) for rollout in rollouts],
            [len(rollout.completion_ids) for rollout in rollouts],
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
            totals = advantages.rewards[mine].tolist()
            sinks.completions.add(rollouts, totals, values.tolist())
        masked = args.mask_truncated_completions
        in_loss = [not (masked and rollout.truncated) for rollout in rollouts]
        order = torch.randperm(len(rollouts)) if slices > 1 else torch.arange(len(rollouts))
        parts = [part.tolist() for part in order.chunk(slices)]
        kept = [sum(len(rollouts[i].completion_ids) for i in part if in_loss[i]) for part in parts]
        # what the batches divide by is averaged over the processes, as their gradients are
        local = torch.tensor(kept, dtype=torch.float64, device=accelerator.device)
        tokens = accelerator.reduce(local, "mean")
        return [
            collate(
                [rollouts[i].prompt_ids for i in part],
                [rollouts[i].completion_ids for i in part],
                [in_loss[i] for i in part],
                values[torch.tensor(part, device=values.device)],
                TokenCounts(tokens.mean(), count),
                pad_token_id(self._tokenizer),
                args.pad_to_multiple_of,
                _logprobs(rollouts[i] for i in part),
            )
            for part, count in zip(parts, tokens, strict=True)
        ]


def _logprobs(rollouts: Iterable[Rollout]) -> list[list[float]] | None:
    """The engine's log-probabilities, if it reports them."""
    found = [rollout.logprobs for rollout in rollouts]
    return None if any(row is None for row in found) else found  # type: ignore[return-value]


def _num_tokens(columns: RolloutColumns) -> int:
    return int(columns.prompt_lengths.sum() + columns.completion_lengths.sum())
