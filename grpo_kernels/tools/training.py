"""Ways to train a model: what is trained, and the bytes per parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from grpo_kernels.tools.activations import ADAPTED, TRAINED, Inside
from grpo_kernels.tools.model import Model

NF4 = 0.5 + 4 / 64  # bytes per weight: blocks of 64, each with an fp32 scale
EIGHT_BIT_SETTINGS = {"optim": "adamw_torch_8bit"}


def moment_bytes(bits: int) -> float:
    """Return the bytes of a parameter's two moments, in blocks of 256 with an fp32 scale."""
    return 2 * (bits / 8 + 4 / 256)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A way to train, in bytes per element."""

    title: str
    linear: float  # weights of the body's linear layers
    weight: int  # other weights
    trained: int  # trained weights, and their gradients
    moments: float  # both AdamW moments of a trained weight
    cast: int = 0  # autocast's copy of the body's weights while the loss is computed
    state: int = 2  # hidden states between layers
    inside: Inside = TRAINED
    rank: int = 0  # of LoRA; 0: all parameters are trained
    settings: dict[str, Any]  # for the run file

    def trainable(self, model: Model) -> int:
        """Return the number of parameters that are trained."""
        return self.rank * model.adapter_widths if self.rank else model.parameters

    def weights(self, model: Model) -> int:
        """Return the bytes of all weights, with an adapter and autocast's copies."""
        others = model.parameters - model.linear
        adapter = self.trainable(model) * self.trained if self.rank else 0
        copies = model.body * self.cast
        return int(model.linear * self.linear) + others * self.weight + adapter + copies

    def gradients(self, model: Model) -> int:
        return self.trainable(model) * self.trained

    def optimizer(self, model: Model) -> int:
        return int(self.trainable(model) * self.moments)

    def eight_bit(self) -> Training:
        """Return the same way with 8-bit moments."""
        return replace(
            self,
            title=f"{self.title}, 8-bit states",
            moments=moment_bytes(8),
            settings=self.settings | EIGHT_BIT_SETTINGS,
        )


_LORA = Training(
    title="LoRA",
    linear=2,
    weight=2,
    trained=4,
    moments=8,
    inside=ADAPTED,
    rank=16,
    settings={"dtype": "bfloat16", "use_peft": True, "lora_target_modules": "all-linear"},
)
WAYS = {
    # the trainer's default: fp32 weights, bf16 by autocast
    "full": Training(
        title="full", linear=4, weight=4, trained=4, moments=8, cast=2, state=4, settings={}
    ),
    # stochastic rounding, so that small updates are not lost
    "bf16": Training(
        title="full, bf16",
        linear=2,
        weight=2,
        trained=2,
        moments=moment_bytes(8),
        settings={
            "dtype": "bfloat16",
            **EIGHT_BIT_SETTINGS,
            "optim_args": "bf16_stochastic_round=True",
        },
    ),
    "lora": _LORA,
    "qlora": replace(
        _LORA,
        title="QLoRA",
        linear=NF4,
        trained=2,  # adapters of a quantized base are in bf16
        moments=4,
        settings=_LORA.settings | {"load_in_4bit": True},
    ),
}


def training(name: str, rank: int = 16) -> Training:
    """Return one of :data:`WAYS`, with adapters of this rank if it has adapters."""
    way = WAYS[name]
    if way.rank in (0, rank):
        return way
    return replace(way, rank=rank, settings=way.settings | {"lora_r": rank})
