"""Ways to train a model: what is trained, and the bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from grpo_kernels.tools.activations import ADAPTED, TRAINED, Inside
from grpo_kernels.tools.model import Model

NF4 = 0.5 + 4 / 64  # bytes of a weight in blocks of 64, each with a scale in fp32
EIGHT_BIT_SETTINGS = {"optim": "adamw_torch_8bit"}


def moment_bytes(bits: int) -> float:
    """Return the bytes of a parameter's two moments, in blocks of 256 with a scale in fp32."""
    return 2 * (bits / 8 + 4 / 256)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A way to train: bytes of a parameter, and of a number between layers."""

    title: str
    linear: float  # a weight of the body's linear layers
    weight: int  # any other weight
    trained: int  # a weight that is trained, and its gradient
    moments: float  # of a weight that is trained: both of AdamW
    cast: int = 0  # the copy of a body's weight that autocast keeps while the loss is computed
    state: int = 2  # a number of the hidden states between layers
    inside: Inside = TRAINED
    rank: int = 0  # of LoRA; 0: all parameters are trained
    settings: dict[str, Any]  # of the run file

    def trainable(self, model: Model) -> int:
        """Return the number of parameters that are trained."""
        return self.rank * model.adapter_widths if self.rank else model.parameters

    def weights(self, model: Model) -> int:
        """Return the bytes of all weights, with an adapter's and autocast's copies."""
        others = model.parameters - model.linear
        adapter = self.trainable(model) * self.trained if self.rank else 0
        copies = model.body * self.cast
        return int(model.linear * self.linear) + others * self.weight + adapter + copies

    def gradients(self, model: Model) -> int:
        return self.trainable(model) * self.trained

    def optimizer(self, model: Model) -> int:
        return int(self.trainable(model) * self.moments)

    def eight_bit(self) -> Training:
        """Return it with moments of 8 bits."""
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
    # the trainer's default: fp32, computed in bf16 by autocast
    "full": Training(
        title="full", linear=4, weight=4, trained=4, moments=8, cast=2, state=4, settings={}
    ),
    # rounds updates at random, so that small ones are not lost
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
        trained=2,  # what is trained above a quantized base is in bf16
        moments=4,
        settings=_LORA.settings | {"load_in_4bit": True},
    ),
}


def training(name: str, rank: int = 16) -> Training:
    """Return one of :data:`WAYS`, with adapters of this rank if it has some."""
    way = WAYS[name]
    if way.rank in (0, rank):
        return way
    return replace(way, rank=rank, settings=way.settings | {"lora_r": rank})
