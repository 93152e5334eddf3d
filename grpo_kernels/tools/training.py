"""Ways to train a model: what is trained, and the bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from grpo_kernels.tools.activations import ADAPTED, TRAINED, Inside
from grpo_kernels.tools.model import Model

NF4 = 0.5 + 4 / 64  # bytes of a weight in blocks of 64, each with a scale in fp32
EIGHT_BIT_SETTINGS = {"optim": "adamw_torch_8bit"}
_ADAPTER_SETTINGS = {"dtype": "bfloat16", "use_peft": True, "lora_target_modules": "all-linear"}


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


def training(name: str, rank: int = 16) -> Training:
    """Return one of :data:`WAYS`.

    ``full`` is the trainer's default: fp32, computed in bf16 by autocast. ``bf16`` keeps weights
    and gradients in bf16, moments in 8 bits, and rounds updates at random, so that small ones are
    not lost. ``lora`` and ``qlora`` train adapters on all linear layers of the body.
    """
    if name == "full":
        return Training(
            title="full", linear=4, weight=4, trained=4, moments=8, cast=2, state=4, settings={}
        )
    if name == "bf16":
        stochastic = {"optim_args": "bf16_stochastic_round=True"}
        return Training(
            title="full, bf16",
            linear=2,
            weight=2,
            trained=2,
            moments=moment_bytes(8),
            settings={"dtype": "bfloat16"} | EIGHT_BIT_SETTINGS | stochastic,
        )
    own_rank = {} if rank == 16 else {"lora_r": rank}
    adapter = Training(
        title="LoRA",
        linear=2,
        weight=2,
        trained=4,
        moments=8,
        inside=ADAPTED,
        rank=rank,
        settings=_ADAPTER_SETTINGS | own_rank,
    )
    if name == "lora":
        return adapter
    return replace(
        adapter,
        title="QLoRA",
        linear=NF4,
        trained=2,  # what is trained above a quantized base is in bf16
        moments=4,
        settings=adapter.settings | {"load_in_4bit": True},
    )


WAYS = ("full", "bf16", "lora", "qlora")
