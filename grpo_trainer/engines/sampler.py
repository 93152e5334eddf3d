"""Rollouts: completions of the policy as it is now, whichever engine samples them."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from transformers import PreTrainedModel

from grpo_kernels.losses import Metrics
from grpo_trainer.data import Rollout, Row, has_images
from grpo_trainer.engines.base import (
    BackgroundEngine,
    Completions,
    Images,
    Pending,
    RolloutEngine,
    TokenIds,
    WeightsLostError,
)
from grpo_trainer.engines.sampling import Sampling
from grpo_trainer.engines.weights import parameter_versions, policy_weights
from grpo_trainer.monitor import phase
from grpo_trainer.policy import WHOLE, Placement

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Rollouts:
    """Gives the engine the policy's weights whenever they have changed, then samples.

    An engine does one thing at a time: whoever asks for the next waits for what runs.
    """

    engine: RolloutEngine
    policy: Callable[[], PreTrainedModel]  # unwrapped
    sampling: Sampling
    step: Callable[[], int]  # optimizer steps taken
    sleeps: bool = False  # the engine, between calls
    placement: Placement = WHOLE  # of the policy's parameters
    _version: object = field(default=None, init=False)  # of the weights that the engine has
    _running: Started | None = field(default=None, init=False)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A completion that ends in none of them was truncated."""
        return self.sampling.eos_token_ids

    def generate(
        self, prompt_ids: list[TokenIds], max_tokens: int | None = None, images: Images = None
    ) -> Completions:
        """Return one completion per prompt, by the policy as it is now.

        ``max_tokens`` is in place of max_completion_length. With several processes it is the same
        on all of them; some may have no prompts.

        Raises:
            ValueError: what the engine returns is no such thing, or it takes no ``images``.
        """
        self._wait()
        if self.sleeps:
            self.engine.wake()
        self._update()
        sampling = self.sampling
        if max_tokens is not None:
            sampling = replace(sampling, max_tokens=max_tokens)
        completions = self.engine.generate(prompt_ids, sampling, **self._with(images))
        if self.sleeps:
            self.engine.sleep()
            self._version = None
        self.check(completions, len(prompt_ids))
        return completions

    def start(self, prompt_ids: list[TokenIds], images: Images = None) -> Started:
        """Start an engine that goes on while the policy moves: it returns at once."""
        assert isinstance(self.engine, BackgroundEngine)  # checked when it was made
        self._wait()
        self._update()
        pending = self.engine.start(prompt_ids, self.sampling, **self._with(images))
        self._running = Started(self, prompt_ids, self.step(), pending, images=images)
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
        self.engine.close()

    def _wait(self) -> None:
        """Wait for what was started. Weights are never sent in the middle of it."""
        running = self._running
        if running is not None:
            running.result()
            self._running = None

    def _update(self) -> None:
        policy = self.policy()
        # fused optimizers leave no trace on the parameters, and loading takes no step
        version = (self.step(), parameter_versions(policy, self.placement))
        if self._version != version:
            with phase("sync"):
                self.engine.update_weights(lambda: policy_weights(policy, self.placement))
            self._version = version

    def outdated(self) -> None:
        """Send the weights before the next generation in any case: they were loaded."""
        self._version = None

    def again(self, prompt_ids: list[TokenIds], images: Images = None) -> tuple[Completions, int]:
        """Sample by the weights as they are now, and say how many steps these have seen."""
        self._running = self._version = None
        return self.generate(prompt_ids, images=images), self.step()

    def _with(self, images: Images) -> dict[str, Images]:
        """Return the engine's argument for ``images``, if there are any."""
        if not has_images(images):
            return {}
        if "images" not in inspect.signature(self.engine.generate).parameters:
            raise ValueError(
                "rollout_engine: expected one whose generate takes images, got "
                f"{type(self.engine).__name__} for prompts with images"
            )
        return {"images": images}

    def check(self, completions: Completions, count: int) -> None:
        """Raise ValueError unless ``completions`` are those of ``count`` prompts."""
        ids, logprobs, mask = completions
        if self.sampling.sampling_mask_size and mask is None:
            raise ValueError(
                "use_sampling_mask: expected an engine that reports which ids its filters left, "
                f"got none from {type(self.engine).__name__}"
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


@dataclass(eq=False)
class Started:
    """A generation that goes on while the policy trains, or has ended."""

    rollouts: Rollouts
    prompt_ids: list[TokenIds]
    step: int  # optimizer steps that the weights had seen
    pending: Pending | None = None  # the engine's handle; None: it is over
    completions: Completions | None = None
    images: Images = None

    def result(self) -> Completions:
        """Wait for the completions. Every process calls it.

        Raises:
            Exception: what went wrong on the other thread, with its traceback.
            ValueError: what the engine returns are no completions of the prompts.
        """
        if self.pending is not None:
            self.completions = self._finish(self.pending)
            self.pending = None
            self.rollouts.check(self.completions, len(self.prompt_ids))
        if self.completions is None:
            raise RuntimeError("rollout engine: the generation has failed, or was cancelled")
        return self.completions

    def _finish(self, pending: Pending) -> Completions:
        try:
            return pending.result()
        except WeightsLostError as error:
            logger.warning("%s: its completions are sampled again, by the policy now", error)
            completions, self.step = self.rollouts.again(self.prompt_ids, self.images)
            return completions
        except Exception:
            self.pending = None  # it is over; after an interrupt it is not
            raise

    def cancel(self) -> None:
        """End the generation if it runs."""
        pending, self.pending = self.pending, None
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
