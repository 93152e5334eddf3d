"""Rollouts: completions of the policy as it is now, whichever engine samples them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedModel

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Rollout, Row
from grpo_trainer.monitor import phase
from grpo_trainer.rollout.base import (
    BackgroundEngine,
    Completions,
    Pending,
    RolloutEngine,
    TokenIds,
    WeightsLostError,
)
from grpo_trainer.rollout.sampling import Sampling
from grpo_trainer.rollout.weights import parameter_versions, policy_weights

logger = logging.getLogger(__name__)


class Rollouts:
    """Gives the engine the policy's weights whenever they have changed, then samples.

    An engine does one thing at a time: whoever asks for the next waits for what runs.

    Args:
        engine: samples.
        policy: gives the unwrapped policy.
        sampling: how.
        step: optimizer steps taken.
        sleeps: send the engine to sleep between calls.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        policy: Callable[[], PreTrainedModel],
        sampling: Sampling,
        step: Callable[[], int],
        sleeps: bool = False,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._sampling = sampling
        self._step = step
        self._sleeps = sleeps
        self._version: object = None  # of the weights that the engine has
        self._running: Started | None = None

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A completion that ends in none of them was truncated."""
        return self._sampling.eos_token_ids

    def generate(self, prompt_ids: list[TokenIds], max_tokens: int | None = None) -> Completions:
        """Return one completion per prompt, by the policy as it is now.

        ``max_tokens`` is in place of max_completion_length. With several processes it is the same
        on all of them; some may have no prompts.

        Raises:
            ValueError: what the engine returns is no such thing.
        """
        self._wait()
        if self._sleeps:
            self._engine.wake()
        self._update()
        sampling = self._sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        completions = self._engine.generate(prompt_ids, sampling)
        if self._sleeps:
            self._engine.sleep()
            self._version = None
        self.check(completions, len(prompt_ids))
        return completions

    def start(self, prompt_ids: list[TokenIds]) -> Started:
        """Start an engine that goes on while the policy moves: it returns at once."""
        assert isinstance(self._engine, BackgroundEngine)  # checked when it was made
        self._wait()
        self._update()
        pending = self._engine.start(prompt_ids, self._sampling)
        self._running = Started(self, prompt_ids, self._step(), pending)
        return self._running

    def restored(self, completions: Completions, step: int) -> Started:
        """Return what was sampled after ``step`` optimizer steps, in an earlier process."""
        return Started(self, [], step, completions=completions)

    def cancel(self) -> None:
        """End what was started, if it still runs."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()

    def close(self) -> None:
        self.cancel()
        self._engine.close()

    def _wait(self) -> None:
        """Wait for what was started. Weights are never sent in the middle of it."""
        running = self._running
        if running is not None:
            running.result()
            self._running = None

    def _update(self) -> None:
        policy = self._policy()
        # fused optimizers leave no trace on the parameters, and loading takes no step
        version = (self._step(), parameter_versions(policy))
        if self._version != version:
            with phase("sync"):
                self._engine.update_weights(lambda: policy_weights(policy))
            self._version = version

    def again(self, prompt_ids: list[TokenIds]) -> tuple[Completions, int]:
        """Sample by the weights as they are now, and say how many steps these have seen."""
        self._running = self._version = None
        return self.generate(prompt_ids), self._step()

    def check(self, completions: Completions, count: int) -> None:
        """Raise ValueError unless ``completions`` are those of ``count`` prompts."""
        ids, logprobs, mask = completions
        if self._sampling.sampling_mask_size and mask is None:
            raise ValueError(
                "use_sampling_mask: expected an engine that reports which ids its filters left, "
                f"got none from {type(self._engine).__name__}"
            )
        if len(ids) != count or not all(ids):
            raise ValueError(
                f"rollout engine: expected {count} completions of one token or more, got "
                f"{len(ids)} with {sum(not row for row in ids)} empty ones"
            )
        lengths = [len(row) for row in ids]
        for name, column in (("log-probability", logprobs), ("sampling mask", mask)):
            if column is not None and [len(row) for row in column] != lengths:
                raise ValueError(
                    f"rollout engine: expected one {name} per token, got "
                    f"{sum(map(len, column))} for {sum(lengths)}"
                )


class Started:
    """A generation that goes on while the policy trains, or has ended.

    Args:
        rollouts: what started it.
        prompt_ids: what for.
        step: optimizer steps that the weights had seen.
        pending: the engine's handle; None: it is over.
        completions: of a generation that is over.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        prompt_ids: list[TokenIds],
        step: int,
        pending: Pending | None = None,
        completions: Completions | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._prompt_ids = prompt_ids
        self._pending = pending
        self._completions = completions
        self.step = step

    def result(self) -> Completions:
        """Wait for the completions. Every process calls it.

        Raises:
            Exception: what went wrong on the other thread, with its traceback.
            ValueError: what the engine returns are no completions of the prompts.
        """
        if self._pending is not None:
            self._completions = self._finish(self._pending)
            self._pending = None
            self._rollouts.check(self._completions, len(self._prompt_ids))
        if self._completions is None:
            raise RuntimeError("rollout engine: the generation has failed, or was cancelled")
        return self._completions

    def _finish(self, pending: Pending) -> Completions:
        try:
            return pending.result()
        except WeightsLostError as error:
            logger.warning("%s: its completions are sampled again, by the policy now", error)
            completions, self.step = self._rollouts.again(self._prompt_ids)
            return completions
        except Exception:
            self._pending = None  # it is over; after an interrupt it is not
            raise

    def cancel(self) -> None:
        """End the generation if it runs."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.cancel()


@dataclass(frozen=True)
class Sampled:
    """n completions, and what came with them."""

    rollouts: list[Rollout]
    # more arguments of reward functions, one value per completion each
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=lambda: Metrics({}))


class Source(Protocol):
    """Where completions come from, if not from one call of the engine."""

    def sample(self, rows: list[Row], rollouts: Rollouts) -> Sampled:
        """Return one completion per row. In a distributed run every process calls it."""
        ...
