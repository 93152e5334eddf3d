"""What completions are made with beside the policy: tools, environments, or a user's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import tokenizer_of
from grpo_trainer.experience.rollout_func import FunctionSource, RolloutFunction, check_rollout_func
from grpo_trainer.rewards import RewardFunction, RewardSource, Tokenizers, resolve_rewards
from grpo_trainer.rollout import Source
from grpo_trainer.tools import Agents, EnvironmentFactory, Environments, make_toolbox


class Interaction:
    """The arguments of the trainer that say so.

    Raises:
        ValueError: one is wrong, or they exclude each other.
    """

    def __init__(
        self,
        args: GRPOConfig,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: EnvironmentFactory | None = None,
        rollout_func: RolloutFunction | None = None,
    ) -> None:
        self._args = args
        self.settings = {  # by which a resumed run knows them
            "tools": tools,
            "environment_factory": environment_factory,
            "rollout_func": rollout_func,
        }
        self._tools = make_toolbox(tools or ())
        self._environments: Environments | None = None
        if environment_factory is not None:
            self._environments = Environments(environment_factory, self._tools)
        self.rollout_func = rollout_func
        agents = bool(self._tools) or self._environments is not None
        if rollout_func is not None:
            check_rollout_func(rollout_func)
            if agents:
                raise ValueError(
                    "rollout_func: expected neither tools nor environment_factory with it: the "
                    "function makes whole completions"
                )
        if args.overlap_generation and (agents or rollout_func is not None):
            raise ValueError(
                "overlap_generation: expected False with tools, environment_factory and "
                "rollout_func, whose completions need the engine more than once"
            )

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """What completions can call: functions, then methods of environments."""
        boxes = [self._tools]
        if self._environments is not None:
            boxes += self._environments.toolboxes
        functions = [tool.function for box in boxes for tool in box.values()]
        return [one for index, one in enumerate(functions) if one not in functions[:index]]

    @property
    def environments(self) -> list[Any] | None:
        """Those of the last batch, one per completion of this process; None without any."""
        return None if self._environments is None else self._environments.taken

    def rewards(
        self,
        sources: RewardSource | Sequence[RewardSource] | None,
        processing_classes: Tokenizers,
    ) -> list[RewardFunction]:
        """Return the reward functions, and after them those of environments.

        Raises:
            ValueError: there are none, or one is wrong.
        """
        own = self._environments.rewards if self._environments is not None else []
        if own and not sources:
            return own
        return resolve_rewards(sources or [], processing_classes, self._args) + own

    def source(self, trainer: Any, context: int | None) -> Source | None:
        """Return what makes the completions; None: one call of the engine.

        Raises:
            ValueError: the chat template cannot write conversations with these tools.
        """
        args, processing_class = self._args, trainer.processing_class
        if self.rollout_func is not None:
            function = self.rollout_func
            tokenizer = tokenizer_of(processing_class)
            return FunctionSource(
                lambda prompts: function(prompts, trainer), args, tokenizer, context
            )
        if not self._tools and self._environments is None:
            return None
        made_of = (args, trainer.accelerator, processing_class, self._tools, self._environments)
        return Agents(*made_of, trainer.rollouts.eos_token_ids, context)
