"""Rollouts: completions of the policy as it is now, whichever engine samples them."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel

from grpo_trainer.rollout.base import Completions, RolloutEngine, Sampling, TokenIds
from grpo_trainer.rollout.weights import parameter_versions, policy_weights


class Rollouts:
    """Gives the engine the policy's weights whenever they have changed, then samples.

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

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """A completion that ends in none of them was truncated."""
        return self._sampling.eos_token_ids

    def generate(self, prompt_ids: list[TokenIds]) -> Completions:
        """One completion per prompt, by the policy as it is now.

        Raises:
            ValueError: what the engine returns is no such thing.
        """
        policy = self._policy()
        # fused optimizers leave no trace on the parameters, and loading takes no step
        version = (self._step(), parameter_versions(policy))
        if self._sleeps:
            self._engine.wake()
        if self._version != version:
            self._engine.update_weights(lambda: policy_weights(policy))
            self._version = version
        completions = self._engine.generate(prompt_ids, self._sampling)
        if self._sleeps:
            self._engine.sleep()
            self._version = None
        _check(completions, len(prompt_ids))
        return completions

    def close(self) -> None:
        self._engine.close()


def _check(completions: Completions, count: int) -> None:
    ids, logprobs = completions
    if len(ids) != count or not all(ids):
        raise ValueError(
            f"rollout engine: expected {count} completions of one token or more, got {len(ids)} "
            f"with {sum(not row for row in ids)} empty ones"
        )
    if logprobs is not None and [len(row) for row in logprobs] != [len(row) for row in ids]:
        raise ValueError(
            "rollout engine: expected one log-probability per token, got "
            f"{sum(map(len, logprobs))} for {sum(map(len, ids))}"
        )
