"""Names of TRL's trainer that ours answers to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_kernels import LossConfig
from grpo_trainer.agents import Environments, Toolbox
from grpo_trainer.config import GRPOConfig
from grpo_trainer.engines import Sampler
from grpo_trainer.experience import AdaptiveEntropy, Collector
from grpo_trainer.policy import Reference
from grpo_trainer.rewards import RewardFunction, RewardModel
from grpo_trainer.vllm import VLLMClient

# attributes to read, most of them fields of the configuration, and where they are
_PLACES = {
    **{
        name: f"args.{name}"
        for name in (
            "chat_template_kwargs", "generation_kwargs", "log_completions", "log_multimodal",
            "log_unique_prompts", "loss_type", "mask_truncated_completions",
            "max_completion_length", "max_tool_calling_iterations", "multi_objective_aggregation",
            "num_completions_to_print", "num_generations", "num_iterations", "pad_to_multiple_of",
            "scale_rewards", "shuffle_dataset", "use_adaptive_entropy",
            "use_transformers_continuous_batching", "use_vllm", "vllm_gpu_memory_utilization",
            "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min",
            "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_mode",
            "vllm_tensor_parallel_size",
        )
    },
    "num_generations_eval": "args.eval_group_size",
    "reward_weights": "_collector.weights",  # one per reward function, (F,)
    "router_aux_loss_coef": "_router_coef",
    "rollout_func": "_rollout_func",
}  # fmt: skip
# attributes that a callback may set, and their fields
_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_THE_LOSS = ("beta", "entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile")
_SETTABLE = {
    **{name: name for name in (*_OF_SAMPLING, *_OF_THE_LOSS)},
    "epsilon_low": "epsilon",
    "epsilon_high": "epsilon_high",
}


class Settings:
    """The arguments of a run, some of which a callback may set between two steps.

    What is set takes effect with the next generation batch, when ``apply`` makes the run go by it,
    so that completions are trained on by the values that they were drawn by. A checkpoint holds it.
    """

    def __init__(self, args: GRPOConfig, apply: Callable[[GRPOConfig], None]) -> None:
        self.args = self._began = args
        self._apply = apply
        self._set: dict[str, Any] = {}
        self._in_effect = self._set

    def set(self, name: str, value: Any) -> None:
        """Set a field for the generation batches to come.

        Raises:
            ValueError: the run cannot go on with it.
        """
        if name in _OF_SAMPLING and self.args.generation_batches_ahead:
            raise ValueError(
                f"{name}: expected no other value with generation_batches_ahead, whose next "
                f"completions are being drawn, got {value!r}"
            )
        if name == "beta" and value != 0 and self._began.beta == 0:
            raise ValueError(
                f"beta: expected 0 in a run that began with it, without a reference, got {value!r}"
            )
        if name == "entropy_coef" and self.args.use_adaptive_entropy:
            raise ValueError(
                f"entropy_coef: expected no other value with use_adaptive_entropy, got {value!r}"
            )
        self.args = self.args.changed(name, value)
        self._set = self._set | {name: value}

    def take_effect(self) -> None:
        """Go by what was set, before a generation batch."""
        if self._set != self._in_effect:
            self._in_effect = self._set
            self._apply(self.args)

    def state(self) -> dict[str, Any]:
        return {"set": self._set, "in_effect": self._in_effect}

    def restore(self, state: dict[str, Any]) -> None:
        for values in (state["in_effect"], state["set"]):
            self.args, self._set = self._began, {}
            for name, value in values.items():
                self.set(name, value)
            if values is state["in_effect"]:
                self.take_effect()


class TrainerAttributes:
    """Attributes to read. Those of the loss and of sampling a callback may set between two steps;
    setting another is an error, since a run has taken its settings by then."""

    args: GRPOConfig
    loss_config: LossConfig
    rollouts: Sampler
    _settings: Settings
    _collector: Collector
    _environments: Environments | None
    _rewards: list[RewardFunction]
    _tools: Toolbox
    _entropy: AdaptiveEntropy | None
    _reference: Reference | None
    _router_coef: float

    @property
    def ref_model(self) -> PreTrainedModel | None:
        """The second model of beta != 0; None if an adapter is switched instead."""
        return None if self._reference is None else self._reference.model

    @property
    def reward_funcs(self) -> list[Callable[..., Any] | nn.Module]:
        """Reward functions and models; those of environments come last."""
        functions = [reward.function for reward in self._rewards]
        return [one.model if isinstance(one, RewardModel) else one for one in functions]

    @property
    def reward_func_names(self) -> list[str]:
        """The names that they are logged with."""
        return [reward.name for reward in self._rewards]

    @property
    def reward_processing_classes(self) -> list[PreTrainedTokenizerBase | None]:
        """The tokenizers of reward models; None for functions."""
        functions = [reward.function for reward in self._rewards]
        return [one.tokenizer if isinstance(one, RewardModel) else None for one in functions]

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

    @property
    def importance_sampling_level(self) -> str:
        """The one given, or that of the named loss."""
        config = self.loss_config
        return config.importance_sampling_level or config.loss.importance_sampling_level

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether a mixture-of-experts model's load-balancing loss is added."""
        return self._router_coef != 0

    @property
    def vllm_client(self) -> VLLMClient | None:
        """The connection to a vLLM server, in the first process; None without one."""
        return getattr(self.rollouts.engine, "client", None)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a completion."""
        return sorted(self.rollouts.eos_token_ids)


def _settable(name: str) -> property:
    """Return an attribute that reads and sets a field."""

    def read(self: TrainerAttributes) -> Any:
        args = self._settings.args
        if name == "entropy_coef" and self._entropy is not None:
            return self._entropy.state()["coef"]  # where it is now
        if name == "epsilon_high" and args.epsilon_high is None:
            return args.epsilon
        return getattr(args, name)

    return property(read, lambda self, value: self._settings.set(name, value))


for _name, _place in _PLACES.items():
    setattr(TrainerAttributes, _name, property(attrgetter(_place)))
for _name, _field in _SETTABLE.items():
    setattr(TrainerAttributes, _name, _settable(_field))


# method -> its arguments; these are called
CALLED = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
}
_LOSS = "define _compute_loss, or register a loss of your own"
_ORDER = "pass a train_dataset in the order that is wanted, and shuffle_dataset=False"
_INSTEAD = {
    "_generate": "pass rollout_func, which makes completions of prompts",
    "_generate_single_turn": "pass rollout_engine, whose generate samples completions",
    "_generate_and_score_completions": (
        "define _calculate_rewards, pass rollout_func, or look at what was made in _compute_loss"
    ),
    "_tokenize_prompts": "pass a processing_class with another chat template, or rollout_func",
    "_tool_call_loop": "pass tools, environment_factory or rollout_func",
    "_get_tool_suffix_ids": "pass a processing_class with another chat template",
    "_get_per_token_logps_and_entropies": _LOSS,
    "get_high_entropy_mask": _LOSS,
    "get_off_policy_mask": _LOSS,
    "get_gamma_weights": _LOSS,
    "get_train_dataloader": _ORDER,
    "_get_train_sampler": _ORDER,
}


def check_overrides(kind: type, base: type) -> None:
    """Raise ValueError if ``kind``, a subclass of ``base``, defines what nobody would call."""
    for name, advice in _INSTEAD.items():
        if getattr(kind, name, None) is not getattr(base, name, None):
            raise ValueError(f"{kind.__name__}.{name}: expected no such method; {advice}")
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
