"""The steps from prompts to micro-batches: draw, generate, score, compare, slice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from grpo_kernels.losses import Metrics
from grpo_trainer.agents import TurnParser
from grpo_trainer.config import loss_config
from grpo_trainer.data import (
    DatasetRow,
    ImageError,
    Media,
    MicroBatch,
    PromptStream,
    Row,
    Sample,
    check_prompt,
    collate,
    computed_tokens,
    cut_rows,
    has_images,
    open_images,
    own_copy,
    repeated,
)
from grpo_trainer.engines import (
    Completions,
    Images,
    Sampler,
    Source,
    TokenIds,
    pad_token_id,
)
from grpo_trainer.experience.advantages import (
    COMPLETION_ARGUMENTS,
    AdvantageFunction,
    Advantages,
    advantages_by,
    check_advantages,
    compute_advantages,
)
from grpo_trainer.experience.comparisons import advantages_of
from grpo_trainer.experience.curriculum import Curriculum
from grpo_trainer.monitor import phase, value_metric

logger = logging.getLogger(__name__)

_ROUNDS = 10  # of rows that are tried, one after the other, in the same place


class Scored(NamedTuple):
    """n completions of this process, and what all N completions of all processes were worth."""

    samples: list[Sample]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    compared: Advantages  # of N completions
    num_tokens: Tensor  # () of prompts and completions, all processes'


class Collector:
    """Makes experience from rows of the dataset, ``{"prompt": ..., other columns}``.

    Args:
        sampler: samples the completions.
        rewards: names of the reward functions.
        source: makes the completions; None: one call of ``sampler`` does.
        advantages: in place of :func:`compute_advantages` with the settings of the run.

    Raises:
        ValueError: there is not one weight per reward function, no token ends a completion, none
            can fill up, or ``advantages`` cannot be called or excludes a setting.
    """

    def __init__(
        self,
        sampler: Sampler,
        rewards: list[str],
        source: Source | None = None,
        advantages: AdvantageFunction | str | None = None,
    ) -> None:
        self.sampler = sampler
        self._context = context = sampler.context
        self._args = context.args
        self._accelerator = context.accelerator
        self._media = Media.of(context.args)
        self._source = source
        self._advantages = function = advantages_of(advantages)
        self._taken = [] if function is None else check_advantages(function, context.args)
        self._by_prompt = loss_config(context.args).aggregation.by_prompt
        weights = context.args.reward_weights or [1.0] * len(rewards)
        if len(weights) != len(rewards):
            raise ValueError(
                f"reward_weights: expected {len(rewards)} values, one per reward function, "
                f"got {len(weights)}"
            )
        self.weight_of = dict(zip(rewards, weights, strict=True))
        self.weights = torch.tensor(weights, device=context.accelerator.device)
        if not sampler.eos_token_ids:
            raise ValueError(
                "processing_class: expected an eos_token (or an eos_token_id in the model's "
                "generation_config or in generation_kwargs), got none, so that no completion "
                "would end"
            )
        multiple = context.args.pad_to_multiple_of
        assert not isinstance(multiple, str)  # on construction auto became a number or None
        self._padding = pad_token_id(context.tokenizer), multiple
        self._parser = TurnParser(context.tokenizer, sampler.eos_token_ids)

    def draw(self, prompts: PromptStream | Curriculum, count: int) -> list[Row]:
        """Return this process's rows of the next ``count`` prompts, a group for each.

        With ``on_bad_image="skip"`` they are those whose images can be read. Each process tries its
        own and tells the others: what one cannot read all replace by the row that comes next.

        Raises:
            ValueError: images of ten rows in a row cannot be read.
        """
        rows, size = prompts.take(count), self._args.num_generations
        own = share(count * size, self._accelerator)
        if self._args.on_bad_image == "skip":
            places = range(own.start // size, -(-own.stop // size))
            for _ in range(_ROUNDS):
                bad = self._unreadable(rows, places)
                if not bad:
                    break
                for index, row in zip(bad, prompts.take(len(bad)), strict=True):
                    rows[index] = row
            else:
                raise ValueError(
                    f"images: expected some that can be read among {_ROUNDS} rows, got none; the "
                    "log says what is wrong with each"
                )
        return list(repeated(rows, size))[own]

    def _unreadable(self, rows: list[Row], places: range) -> list[int]:
        """Return which rows have images that a process cannot read, of those at its ``places``."""
        bad = torch.zeros(len(rows), device=self._accelerator.device)
        for index in places:
            try:
                self._open(rows[index])
            except ImageError as error:
                bad[index] = 1
                logger.warning("a row is skipped: %s", error)
        return self._accelerator.reduce(bad).nonzero()[:, 0].tolist()

    def read(self, rows: list[Row]) -> list[Sample]:
        """Return a sample for each of ``rows``, the images of each in its prompt.

        Raises:
            ValueError: a prompt is neither text nor messages of text and images, or an image cannot
                be read.
        """
        once = {id(row): row for row in rows}  # a group has one row
        opened = {key: self._open(row) for key, row in once.items()}
        copies = [own_copy(opened[id(row)]) for row in rows]
        pairs = zip(rows, copies, strict=True)
        return [Sample(own.get("prompt"), row=row, inputs=own) for row, own in pairs]

    def _open(self, row: Row) -> Row:
        if isinstance(row, DatasetRow) and row.opened is not None:
            return row.opened  # a URL might not answer a second time
        check_prompt(row)
        opened = open_images(row, self._media)
        if isinstance(row, DatasetRow):
            row.opened = opened
        return opened

    def generate(self, samples: list[Sample]) -> Metrics:
        """Complete what :meth:`read` returned, and say what is logged of that."""
        if self._source is not None:
            with phase("generate"):
                return self._source(samples)
        self._context.encode(samples)
        prompt_ids, images = prompts_of(samples)
        with phase("generate"):
            completions = self.sampler.generate(prompt_ids, images=images)
        self.complete(samples, completions)
        return Metrics({})

    def complete(self, samples: list[Sample], completions: Completions) -> None:
        """Add what an engine made of the prompts of ``samples``."""
        prompts = [sample.prompt for sample in samples]
        prompt_ids, _ = prompts_of(samples)
        texts = self._parser.completions(prompts, prompt_ids, completions.token_ids)
        for sample, text, row in zip(samples, texts, completions.rows(), strict=True):
            ids, sample.logprobs, sample.sampling_mask = row
            sample.completed(text, ids, self.sampler.eos_token_ids)

    def checked(self, rewards: Any, count: int) -> Tensor:
        """Return rewards of ``count`` completions of each process, (N, F) fp32; ValueError unless
        they are one per completion and function."""
        shape = (count * self._accelerator.num_processes, len(self.weights))
        if not isinstance(rewards, Tensor) or rewards.shape != shape:
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
            raise ValueError(
                f"_calculate_rewards: expected a tensor of {shape}, all processes' completions by "
                f"reward functions, got {got}"
            )
        return rewards.to(self._accelerator.device, torch.float32)

    def compare(self, rewards: Tensor, samples: list[Sample], group_size: int) -> Advantages:
        """Return the advantages of all N completions, of which ``samples`` are this process's."""
        if self._advantages is None:
            scale, aggregation = self._args.scale_rewards, self._args.multi_objective_aggregation
            compared = compute_advantages(rewards, self.weights, group_size, scale, aggregation)
            return compared._replace(advantages=compared.advantages.float())
        completions = {
            name: gather_object([getattr(sample, COMPLETION_ARGUMENTS[name]) for sample in samples])
            for name in self._taken
        }
        return advantages_by(
            self._advantages,
            rewards,
            self.weights,
            group_size=group_size,
            completions=completions,
            lengths=gather_object([len(sample.completion_ids) for sample in samples]),
        )

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

    def fill(self, first: Scored, more: Callable[[int], Scored]) -> tuple[Scored, Metrics]:
        """Return a batch as large as ``first``, of groups that have something to learn from: DAPO's
        dynamic sampling (arXiv:2503.14476).

        Each round draws as many of the next prompts as groups are missing (rounded up to what the
        processes can share), at most ``max_resampling_rounds`` times. What is still missing then is
        taken from the groups without variance, in the order they were drawn: their advantages are
        0. Groups that are not needed are discarded.

        Args:
            first: a scored generation batch.
            more: draws, generates and scores that many further prompts.
        """
        accelerator, size = self._accelerator, self._args.num_generations
        # fewest groups that all processes have an equal share of
        unit = accelerator.num_processes // math.gcd(accelerator.num_processes, size)
        rounds = [first]
        useful: list[bool] = first.compared.signal.tolist()
        wanted = len(useful)
        while sum(useful) < wanted and len(rounds) <= self._args.max_resampling_rounds:
            missing = wanted - sum(useful)
            rounds.append(more(missing + -missing % unit))
            useful += rounds[-1].compared.signal.tolist()
        counts = {
            "resampling_rounds": len(rounds) - 1,
            "discarded_groups": len(useful) - wanted,
            "unfilled_groups": max(wanted - sum(useful), 0),
        }
        metrics = Metrics.merge(
            value_metric(f"dynamic_sampling/{name}", count, accelerator.device)
            for name, count in counts.items()
        )
        if len(rounds) == 1:
            return first, metrics
        # useful ones first, both kinds in the order they were drawn
        groups = sorted(range(len(useful)), key=lambda group: not useful[group])[:wanted]
        places = [group * size + member for group in groups for member in range(size)]
        # a group may have been made by other processes than those that train on it
        everyone = [sample for part in rounds for sample in gather_object(part.samples)]
        rewards = torch.cat([part.rewards for part in rounds])
        rewards = rewards[torch.tensor(places, device=rewards.device)]
        samples = [everyone[place] for place in places[share(len(places), accelerator)]]
        num_tokens = torch.stack([part.num_tokens for part in rounds]).sum()
        compared = self.compare(rewards, samples, size)
        return Scored(samples, rewards, compared, num_tokens), metrics

    def slices(
        self, scored: Scored, count: int, budget: int | None = None
    ) -> tuple[list[MicroBatch], Metrics]:
        """Deal completions to ``count`` micro-steps; those of several are shuffled first.

        Each has one micro-batch. With a ``budget`` the completions of micro-steps of one optimizer
        step are pooled, and cut into micro-batches of at most so many tokens.
        """
        samples, device = scored.samples, self._accelerator.device
        advantages = scored.compared.advantages[self.own(scored)]
        order = torch.randperm(len(samples)) if count > 1 else torch.arange(len(samples))
        pooled = math.gcd(count, self._args.gradient_accumulation_steps) if budget else 1
        pools = [pool.tolist() for pool in order.chunk(count // pooled)]
        counts = [sum(chain(*(samples[i].in_loss for i in pool))) for pool in pools]
        # what the batches divide by is averaged over the processes, as their gradients are
        local = torch.tensor(counts, dtype=torch.float64, device=device)
        tokens = self._accelerator.reduce(local, "mean") / pooled
        cut = self._cut(samples, pools, budget, pooled) if budget else (pools, Metrics({}))
        parts, metrics = cut
        indices = [torch.tensor(part, device=device) for part in parts]
        numbers, mean = tokens.repeat_interleave(len(parts) // len(pools)), tokens.mean()
        batches = [
            collate([samples[i] for i in part], advantages[index], mean, number, *self._padding)
            for part, index, number in zip(parts, indices, numbers, strict=True)
        ]
        if budget:
            for batch in batches:
                batch.share, batch.num_sequences = count / len(parts), len(samples) / count
        if self._by_prompt:
            own = torch.tensor([sum(sample.in_loss) for sample in samples], device=device)
            groups = self._accelerator.gather(own).view(len(scored.compared.signal), -1).sum(1)
            size = len(scored.rewards) // len(groups)
            each = groups.repeat_interleave(size)[self.own(scored)]
            number = (groups > 0).sum() / (count * self._accelerator.num_processes)
            for batch, index in zip(batches, indices, strict=True):
                batch.prompt_tokens, batch.num_prompts = each[index], number
        return batches, metrics

    def count_active(self, batches: list[MicroBatch], count: int) -> None:
        """Let the means of ``count`` micro-steps leave out completions without an advantage.

        What they divide by is averaged over micro-steps and processes, as their gradients are.
        """
        active = torch.stack([batch.num_active() for batch in batches]).sum(0)
        sequences, prompts = self._accelerator.reduce(active, "mean") / count
        for batch in batches:
            batch.num_sequences = sequences
            if self._by_prompt:
                batch.num_prompts = prompts

    def _cut(
        self, samples: list[Sample], pools: list[list[int]], budget: int, least: int
    ) -> tuple[list[list[int]], Metrics]:
        """Cut pools of completions, the longest first, into micro-batches of at most ``budget``
        tokens: equally many of each pool and on each process, since their collectives go together.

        Raises:
            ValueError: a completion with its prompt has more tokens; on all processes.
        """
        lengths = [len(sample.prompt_ids) + len(sample.completion_ids) for sample in samples]

        def cost(part: list[int]) -> int:
            return computed_tokens([lengths[i] for i in part], self._padding[1])

        def cut(least: int) -> list[list[list[int]]]:
            ordered = (sorted(pool, key=lambda i: -lengths[i]) for pool in pools)
            return [cut_rows(pool, cost, budget, least) for pool in ordered]

        needed = [max(map(len, cut(least))), max(cost([i]) for i in range(len(samples)))]
        device = self._accelerator.device
        everyone = self._accelerator.gather(torch.tensor([needed], device=device))
        number, longest = everyone.amax(0).tolist()
        if longest > budget:
            raise ValueError(
                f"max_tokens_per_micro_batch: expected at least {longest}, the tokens of the "
                f"longest completion with its prompt, got {budget}; raise it, or lower "
                "max_completion_length or max_prompt_length"
            )
        parts = [*chain(*cut(number))]
        computed = sum(map(cost, parts))
        each_step = number * self._args.gradient_accumulation_steps // least
        padding = value_metric("micro_batches/padding", computed - sum(lengths), device, computed)
        numbers = value_metric("micro_batches/number", each_step, device)
        return parts, Metrics.merge([padding, numbers])

    def own(self, scored: Scored) -> slice:
        """Return which of the N completions are this process's."""
        return share(len(scored.rewards), self._accelerator)


def prompts_of(samples: list[Sample]) -> tuple[list[TokenIds], Images]:
    """Return what an engine is asked to complete."""
    return [sample.prompt_ids for sample in samples], [sample.images for sample in samples]


def share(count: int, accelerator: Accelerator) -> slice:
    """Return the rows of ``count`` that belong to this process."""
    process, processes = accelerator.process_index, accelerator.num_processes
    return slice(process * count // processes, (process + 1) * count // processes)
