"""The interfaces of prime-rl 0.8, NeMo-RL 0.6 and SkyRL 0.3, computed with full logits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tests.integrations.checkouts import Host

_EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "hosts"


def copied(name: str) -> Any:
    """Import a file of docs/examples/hosts, as those who have copied it do."""
    if (folder := str(_EXAMPLES)) not in sys.path:
        sys.path.append(folder)
    return import_module(name)


def statistics(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of ids (...) and entropies (...) of logits (..., V)."""
    logp = logits.log_softmax(-1)
    return logp.gather(-1, ids[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


class PrimeLmOutput(TypedDict, total=False):
    logits: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None
    loss: Tensor | None


class FusedOutputLinear(nn.Linear):
    softcap: float | None = None

    def __init__(self, in_features: int, out_features: int, chunk_size: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> PrimeLmOutput:
        assert labels is not None and temperature is not None
        logits = nn.Linear.forward(self, hidden_states).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        logprobs, entropy = statistics(logits / temperature[..., None], labels)
        return PrimeLmOutput(logprobs=logprobs, entropy=entropy)


class GemmaFusedOutputLinear(FusedOutputLinear):
    def __init__(
        self, in_features: int, out_features: int, chunk_size: int, softcap: float
    ) -> None:
        super().__init__(in_features, out_features, chunk_size)
        self.softcap = softcap

    forward = FusedOutputLinear.forward  # each has one of its own to be replaced


@dataclass
class LossInputs:
    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass
class LossOutputs:
    loss: Tensor
    metrics: dict[str, Tensor]


def compute_loss(
    trainer_logprobs: list[Tensor],
    inference_logprobs: list[Tensor],
    ref_logprobs: list[Tensor] | None,
    advantages: list[Tensor],
    loss_mask: list[Tensor],
    rl_weights: list[Tensor] | None,
    ce_weights: list[Tensor] | None,
    ref_kl_weights: list[Tensor] | None,
    rl_loss_fn: Callable[..., LossOutputs],
    rl_scale: int,
    ce_scale: int,
    ref_kl_scale: int,
) -> tuple[Tensor, dict[str, Any]]:
    found: dict[str, list[Tensor]] = {}
    loss = torch.zeros(())
    none: list[None] = [None] * len(trainer_logprobs)
    streams = (ref_logprobs or none, advantages, loss_mask, rl_weights or none)
    for each in zip(trainer_logprobs, inference_logprobs, *streams, strict=True):
        outputs = rl_loss_fn(LossInputs(*each))
        loss = loss + outputs.loss
        for name, value in outputs.metrics.items():
            found.setdefault(name, []).append(value)
    return loss / rl_scale, {name: torch.stack(values) for name, values in found.items()}


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    logits = (tensor_parallel_hidden_states @ output_weight_layer.t()).float().transpose(0, 1)
    return statistics(logits[:, :-1], target[:, 1:])[0]


def _fused_lm_head_logprob_apply(
    backend: str,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int,
    tp_group: Any,
    inference_only: bool,
) -> Tensor:
    return statistics((hidden.to(weight.dtype) @ weight.t()).float(), target)[0]


def _fused_vocab_parallel_entropy_from_hidden(
    hidden: Tensor,
    lm_head_weight: Tensor,
    tp_group: Any,
    chunk_size: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    logits = hidden.to(lm_head_weight.dtype) @ (lm_head_weight / temperature).t()
    ids = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
    return statistics(logits.float(), ids)[1]


def _skyrl() -> dict[str, dict[str, Any]]:
    def from_parallel_hidden_to_logprobs(
        hidden: Tensor,
        lm_head_weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        tp_group: Any,
        inference_only: bool = False,
        cp_group: Any = None,
        chunk_size: int | None = None,
        temperature: float = 1.0,
        fused_backend: str = "torch",
    ) -> Tensor:
        """Look the replaced function up in its module, as theirs does."""
        module: Any = sys.modules[_MODEL_UTILS]
        bounds = (vocab_start_index, vocab_end_index, chunk_size or hidden.shape[1])
        return module._fused_lm_head_logprob_apply(
            fused_backend,
            hidden,
            lm_head_weight / temperature,
            pad(target[:, 1:], (0, 1)),
            *bounds,
            tp_group,
            inference_only,
        )[:, :-1]

    class PolicyLossRegistry:
        functions: ClassVar[dict[str, Callable[..., Any]]] = {}

        @classmethod
        def register(cls, name: str, func: Callable[..., Any]) -> None:
            if name in cls.functions:
                raise ValueError(f"policy loss '{name}' already registered")
            cls.functions[name] = func

        @classmethod
        def get(cls, name: str) -> Callable[..., Any]:
            return cls.functions[name]

    functions = (
        _fused_lm_head_logprob_apply,
        _fused_vocab_parallel_entropy_from_hidden,
        from_parallel_hidden_to_logprobs,
    )
    PolicyLossRegistry.functions = {}
    return {
        _MODEL_UTILS: {each.__name__: each for each in functions},
        _PPO_UTILS: {"PolicyLossRegistry": PolicyLossRegistry},
    }


_MODEL_UTILS = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_PPO_UTILS = "skyrl.backends.skyrl_train.utils.ppo_utils"
_LAYERS = "prime_rl.trainer.models.layers"

PRIME_RL = Host(
    package="prime-rl",
    version="0.8.0",
    folders=("prime-rl",),
    source="src",
    stand_in=lambda: {
        f"{_LAYERS}.lm_head": {
            "PrimeLmOutput": PrimeLmOutput,
            "FusedOutputLinear": FusedOutputLinear,
        },
        f"{_LAYERS}.lm_head_gemma": {"GemmaFusedOutputLinear": GemmaFusedOutputLinear},
        "prime_rl.trainer.rl.loss": {
            "LossInputs": LossInputs,
            "LossOutputs": LossOutputs,
            "compute_loss": compute_loss,
        },
    },
    unreached=(
        "beartype",
        "jaxtyping",
        "prime_rl.configs",
        "prime_rl.configs.trainer",
        "prime_rl.utils",
        "prime_rl.utils.logger",
        "prime_rl.utils.vlm",
        "prime_rl.utils.utils",
    ),
)

NEMO_RL = Host(
    package="nemo-rl",
    version="0.6.0+7ea279a",
    folders=("NeMo-RL", "nemo-rl"),
    source="",
    stand_in=lambda: {
        "nemo_rl.distributed.model_utils": {
            "from_parallel_hidden_states_to_logprobs": from_parallel_hidden_states_to_logprobs
        }
    },
    unreached=("nemo_rl.algorithms", "nemo_rl.algorithms.logits_sampling_utils"),
)

SKYRL = Host(
    package="skyrl",
    version="0.3.0",
    folders=("SkyRL",),
    source="",
    stand_in=_skyrl,
    unreached=(
        "jaxtyping",
        "loguru",
        "megatron",
        "megatron.core",
        "megatron.core.parallel_state",
        "omegaconf",
        "ray",
        "skyrl.train",
        "skyrl.train.config",
    ),
)
