"""Names of TRL's trainer that also work on this one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from grpo_trainer.assemble import Inputs, Models
from grpo_trainer.config import CHANGEABLE, GRPOConfig, Settings
from grpo_trainer.experience import AdaptiveEntropy
from grpo_trainer.rewards import RewardModel

ALIASES = {"epsilon_low": "epsilon"}  # TRL's attribute: the field


class TrlNames:
    """Fields of the configuration, and more names of TRL's trainer, as readable attributes."""

    settings: Settings
    _entropy: AdaptiveEntropy | None
    _inputs: Inputs
    _models: Models

    def __getattr__(self, name: str) -> Any:  # called only for missing attributes
        if isinstance(getattr(type(self), name, None), property):
            return object.__getattribute__(self, name)  # raises the property's own error
        field = ALIASES.get(name, name)
        if field in GRPOConfig.__dataclass_fields__ and "settings" in vars(self):
            return getattr(self.settings.args, field)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        field = ALIASES.get(name, name)
        if field in CHANGEABLE:  # nothing would read the attribute
            raise AttributeError(
                f"{name}: expected trainer.change({field}={value!r}), which takes effect with the "
                "next generation batch, got an assignment"
            )
        super().__setattr__(name, value)

    @property
    def epsilon_high(self) -> float:
        """The upper bound of the ratio less 1."""
        args = self.settings.args
        return args.epsilon if args.epsilon_high is None else args.epsilon_high

    @property
    def entropy_coef(self) -> float:
        """The weight of the entropy bonus now; with use_adaptive_entropy it moves."""
        moving = self._entropy
        return self.settings.args.entropy_coef if moving is None else moving.state()["coef"]

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The second model for beta != 0; None if an adapter is switched instead."""
        reference = self._models.reference
        return None if reference is None else reference.model

    @property
    def reward_funcs(self) -> list[Callable[..., Any] | nn.Module]:
        """Reward functions and models; the environments' rewards come last."""
        functions = [reward.function for reward in self._inputs.rewards]
        return [each.model if isinstance(each, RewardModel) else each for each in functions]

    @property
    def reward_func_names(self) -> list[str]:
        """The names that rewards are logged under."""
        return [reward.name for reward in self._inputs.rewards]

    @property
    def tools(self) -> list[Callable[..., Any]]:
        """The tools that completions can call: functions, then methods of environments."""
        boxes = [self._inputs.toolbox]
        if self._inputs.environments is not None:
            boxes += self._inputs.environments.toolboxes
        functions = [tool.function for box in boxes for tool in box.values()]
        return [one for index, one in enumerate(functions) if one not in functions[:index]]

    @property
    def environments(self) -> list[Any] | None:
        """The environments of the last batch, one per completion of this process, or None."""
        environments = self._inputs.environments
        return None if environments is None else environments.scored


# methods that are called -> their arguments
CALLED = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
}
_COMPLETIONS = "pass rollout_func, which completes prompts, or rollout_engine, which samples"
_LOSS = "pass terms, define _compute_loss, or register your own loss"
_ORDER = "pass prompts, or a train_dataset in the order to train in and shuffle_dataset=False"
_TEMPLATE = "pass a processing_class with another chat template, or rollout_func"
_INSTEAD = {
    "_generate": _COMPLETIONS,
    "_generate_single_turn": _COMPLETIONS,
    "_generate_and_score_completions": (
        "pass prompts, which chooses the training prompts, columns, which compute values for a "
        "micro-batch, or rollout_func; or define _calculate_rewards"
    ),
    "_tokenize_prompts": _TEMPLATE,
    "_tool_call_loop": "pass tools, environment_factory or rollout_func",
    "_get_tool_suffix_ids": _TEMPLATE,
    "_get_per_token_logps_and_entropies": _LOSS,
    "get_high_entropy_mask": _LOSS,
    "get_off_policy_mask": _LOSS,
    "get_gamma_weights": _LOSS,
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
}


def check_overrides(kind: type, base: type) -> None:
    """Raise ValueError if ``kind``, a subclass of ``base``, defines a method that is never
    called."""
    for name, advice in _INSTEAD.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ValueError(
                f"{kind.__name__}.{name}: expected no method of this name, since it is never "
                f"called; {advice}"
            )
    for name, arguments in CALLED.items():
        method = getattr(kind, name)
        if method is getattr(base, name):
            continue
        signature = inspect.signature(method)
        try:
            signature.bind(None, *arguments)
        except TypeError as error:
            raise ValueError(
                f"{kind.__name__}.{name}: expected a method that takes ({', '.join(arguments)}), "
                f"got {signature}"
            ) from error
