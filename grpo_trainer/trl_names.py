"""Names of TRL's trainer that ours answers to."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_kernels import LossConfig
from grpo_trainer.config import GRPOConfig
from grpo_trainer.engines import Sampler
from grpo_trainer.experience import AdaptiveEntropy, Collector
from grpo_trainer.policy import Reference
from grpo_trainer.rewards import RewardModel
from grpo_trainer.vllm import VLLMClient

_SETTINGS = (
    "chat_template_kwargs", "generation_kwargs", "log_completions", "log_multimodal",
    "log_unique_prompts", "loss_type",
    "mask_truncated_completions", "max_completion_length", "max_tool_calling_iterations", "min_p",
    "multi_objective_aggregation", "num_completions_to_print", "num_generations", "num_iterations",
    "off_policy_mask_threshold", "pad_to_multiple_of", "repetition_penalty", "scale_rewards",
    "shuffle_dataset", "temperature", "top_entropy_quantile", "top_k", "top_p",
    "use_adaptive_entropy", "use_transformers_continuous_batching", "use_vllm",
    "vllm_gpu_memory_utilization", "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min", "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode", "vllm_mode", "vllm_tensor_parallel_size",
)  # fmt: skip
_PLACES = {name: f"args.{name}" for name in _SETTINGS} | {
    "beta": "loss_config.beta",
    "epsilon_low": "args.epsilon",
    "num_generations_eval": "args.eval_group_size",
    "router_aux_loss_coef": "_router_coef",
    "environments": "_interaction.environments",
    "rollout_func": "_interaction.rollout_func",
    "tools": "_interaction.tools",
}


class TrainerAttributes:
    """Attributes to read; setting one is an error, since a run has taken its settings by then."""

    args: GRPOConfig
    loss_config: LossConfig
    rollouts: Sampler
    _collector: Collector
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
        functions = [reward.function for reward in self._collector.scorer.rewards]
        return [one.model if isinstance(one, RewardModel) else one for one in functions]

    @property
    def reward_func_names(self) -> list[str]:
        """The names that they are logged with."""
        return [reward.name for reward in self._collector.scorer.rewards]

    @property
    def reward_processing_classes(self) -> list[PreTrainedTokenizerBase | None]:
        """The tokenizers of reward models; None for functions."""
        functions = [reward.function for reward in self._collector.scorer.rewards]
        return [one.tokenizer if isinstance(one, RewardModel) else None for one in functions]

    @property
    def reward_weights(self) -> Tensor:
        """One per reward function, (F,)."""
        return self._collector.weights

    @property
    def importance_sampling_level(self) -> str:
        """The one given, or that of the named loss."""
        config = self.loss_config
        return config.importance_sampling_level or config.loss.importance_sampling_level

    @property
    def epsilon_high(self) -> float:
        """The upper clip distance, that of cispo the bound itself."""
        args = self.args
        return args.epsilon if args.epsilon_high is None else args.epsilon_high

    @property
    def entropy_coef(self) -> float:
        """The coefficient of the entropy bonus, with use_adaptive_entropy where it is now."""
        return self.args.entropy_coef if self._entropy is None else self._entropy.state()["coef"]

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


for _name, _place in _PLACES.items():
    setattr(TrainerAttributes, _name, property(attrgetter(_place)))


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
