"""From dataset rows to scored micro-batches: generate, reward, compare, shuffle, slice."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainerState

from grpo_trainer.advantages import Advantages, compute_advantages
from grpo_trainer.completions import CompletionLog
from grpo_trainer.config import GRPOConfig, options
from grpo_trainer.metrics import MetricLog, RolloutColumns, rollout_metrics
from grpo_trainer.microbatch import MicroBatch, collate
from grpo_trainer.prompts import Prompt, decode_completions, encode_prompts
from grpo_trainer.rewards import RewardFunction, score
from grpo_trainer.rollout import RolloutEngine
from grpo_trainer.rollout.transformers import pad_token_id

logger = logging.getLogger(__name__)

# passed to reward functions under other names
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class Rollouts(NamedTuple):
    """This process's n completions."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    completions: list[Any]
    completion_ids: list[list[int]]
    truncated: list[bool]


class Experience(NamedTuple):
    """A scored generation batch, ready for the loss."""

    batches: list[MicroBatch]
    num_tokens: int  # prompts and completions, all processes


class Collector:
    """Makes experience from rows of the dataset, ``{"prompt": ..., other columns}``.

    Args:
        args: sampling, reward and loss settings.
        accelerator: joins groups that are spread over processes.
        tokenizer: of the policy.
        engine: samples the completions.
        rewards: the reward functions.
    """

    def __init__(
        self,
        args: GRPOConfig,
        accelerator: Accelerator,
        tokenizer: PreTrainedTokenizerBase,
        engine: RolloutEngine,
        rewards: list[RewardFunction],
    ) -> None:
        self._args = args
        self._accelerator = accelerator
        self._tokenizer = tokenizer
        self._engine = engine
        self._rewards = rewards
        weights = args.reward_weights or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(
                f"reward_weights: expected {len(rewards)} values, one per reward function, "
                f"got {len(weights)}"
            )
        self._weights = torch.tensor(weights, device=accelerator.device)

    def collect(
        self,
        rows: list[dict[str, Any]],
        group_size: int,
        slices: int,
        state: TrainerState,
        metrics: MetricLog,
        log: CompletionLog | None = None,
    ) -> Experience:
        """Generates and scores one completion per row, then deals them to ``slices`` batches.

        Rows of a prompt's group are consecutive, over the processes in order. With more than one
        slice the completions are shuffled first.
        """
        rollouts = self._generate(rows)
        local = self._score(rows, rollouts, state)  # (n, F)
        rewards, columns = self._gather(local, rollouts)  # (N, F), N over all processes
        args = self._args
        advantages = compute_advantages(
            rewards, self._weights, group_size, args.scale_rewards, args.multi_objective_aggregation
        )
        names = [reward.name for reward in self._rewards]
        metrics.add(rollout_metrics(names, rewards, advantages, columns))
        mine = slice(
            self._accelerator.process_index * len(rows),
            (self._accelerator.process_index + 1) * len(rows),
        )
        if log is not None:
            self._log_completions(log, rollouts, advantages, mine)
        batches = self._slices(rollouts, advantages.advantages[mine], columns, slices)
        tokens = columns.prompt_lengths.sum() + columns.completion_lengths.sum()
        return Experience(batches, int(tokens))

    def _generate(self, rows: list[dict[str, Any]]) -> Rollouts:
        args = self._args
        prompts = [row["prompt"] for row in rows]
        template = options("chat_template_kwargs", args.chat_template_kwargs)
        prompt_ids = encode_prompts(prompts, self._tokenizer, args.max_prompt_length, template)
        completion_ids = self._engine.generate(prompt_ids)
        completions = decode_completions(completion_ids, prompts, self._tokenizer)
        truncated = [ids[-1] not in self._engine.eos_token_ids for ids in completion_ids]
        return Rollouts(prompts, prompt_ids, completions, completion_ids, truncated)

    def _score(
        self, rows: list[dict[str, Any]], rollouts: Rollouts, state: TrainerState
    ) -> Tensor:  # (n, F)
        names = [name for name in rows[0] if name not in _NOT_COLUMNS]
        arguments = {name: [row[name] for row in rows] for name in names} | {
            "prompts": rollouts.prompts,
            "completions": rollouts.completions,
            "completion_ids": rollouts.completion_ids,
            "trainer_state": state,
        }
        rewards = score(self._rewards, len(rows), arguments)
        unscored = rewards.isnan().all(1).nonzero().flatten().tolist()
        if unscored:
            logger.warning(
                "every reward function returned None for %d of %d completions, which get "
                "advantage 0; the first prompt is %r",
                len(unscored),
                len(rows),
                rollouts.prompts[unscored[0]],
            )
        return rewards

    def _gather(self, rewards: Tensor, rollouts: Rollouts) -> tuple[Tensor, RolloutColumns]:
        """All processes' rewards and lengths, by one gather."""
        measures = [
            [len(ids) for ids in rollouts.prompt_ids],
            [len(ids) for ids in rollouts.completion_ids],
            rollouts.truncated,
        ]
        table = torch.cat([rewards, torch.tensor(measures, dtype=torch.float32).T], dim=1)
        everyone = self._accelerator.gather(table.to(self._accelerator.device))
        return everyone[:, :-3], RolloutColumns(*everyone[:, -3:].unbind(1))

    def _slices(
        self, rollouts: Rollouts, advantages: Tensor, columns: RolloutColumns, slices: int
    ) -> list[MicroBatch]:
        args = self._args
        masked = columns.truncated if args.mask_truncated_completions else 0.0
        in_loss = [not (cut and args.mask_truncated_completions) for cut in rollouts.truncated]
        tokens = (columns.completion_lengths * (1 - masked)).sum().clamp(min=1)
        num_items = tokens / (self._accelerator.num_processes * slices)
        count = len(rollouts.prompts)
        order = torch.randperm(count) if slices > 1 else torch.arange(count)
        batches = []
        for part in order.chunk(slices):
            chosen = part.tolist()
            batches.append(
                collate(
                    [rollouts.prompt_ids[i] for i in chosen],
                    [rollouts.completion_ids[i] for i in chosen],
                    [in_loss[i] for i in chosen],
                    advantages[part.to(advantages.device)],
                    num_items,
                    pad_token_id(self._tokenizer),
                    args.pad_to_multiple_of,
                )
            )
        return batches

    def _log_completions(
        self, log: CompletionLog, rollouts: Rollouts, advantages: Advantages, mine: slice
    ) -> None:
        log.add(
            rollouts.prompts,
            rollouts.completions,
            advantages.rewards[mine].tolist(),
            advantages.advantages[mine].tolist(),
        )
