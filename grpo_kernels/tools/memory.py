"""The memory of a run on one GPU, by part and by moment of a step: estimated by formulas."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_kernels.tools.activations import TILE, activations, masks
from grpo_kernels.tools.call import Call
from grpo_kernels.tools.estimate import total
from grpo_kernels.tools.model import Model
from grpo_kernels.tools.training import NF4, Training

GIB = 1 << 30
SLACK = 2 * GIB  # the CUDA context, library workspaces, allocator fragmentation
_OF_CUDA = {"CUDA context, slack": SLACK}
ENGINE_SLACK = 2 * GIB  # in vLLM's share: activations, CUDA graphs, and a small KV cache
DEFAULT_SHARE = 0.3  # the trainer's vllm_gpu_memory_utilization
_SHARE_STEP = 0.05
_LARGEST_SHARE = 0.9
STEP = 256  # tokens between the micro-batches that are tried
_MOST_STEPS = 1 << 13
ENGINES = ("none", "colocate", "server", "transformers")
ENGINE_WEIGHTS = {"bf16": 2, "fp8": 1}  # bytes per element of the body's matrices
_FP8 = "fp8_per_channel"  # a vLLM method that quantizes the weights after every update


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine that samples completions: its place, and its share of the GPU."""

    place: str = "none"  # one of ENGINES; none: nothing on this GPU is planned
    share: float | None = None  # of a colocated vLLM; None: the default, or what its weights need
    weights: str = "bf16"  # one of ENGINE_WEIGHTS
    sleeps: bool = False

    @property
    def colocated(self) -> bool:
        return self.place == "colocate"

    @property
    def samples_by_vllm(self) -> bool:
        return self.place in ("colocate", "server")

    def weight_bytes(self, model: Model) -> int:
        matrices = model.linear + model.experts
        return matrices * ENGINE_WEIGHTS[self.weights] + (model.parameters - matrices) * 2

    def share_of(self, model: Model, memory: int) -> float:
        """Return the part of ``memory`` that a colocated vLLM uses."""
        if self.share is not None:
            return self.share
        needed = (self.weight_bytes(model) + ENGINE_SLACK) / memory
        steps = math.ceil(round(needed / _SHARE_STEP, 6))
        return min(max(DEFAULT_SHARE, round(steps * _SHARE_STEP, 2)), _LARGEST_SHARE)

    def settings(self, model: Model, memory: int) -> dict[str, Any]:
        """Return the engine's lines of the run file."""
        if self.place in ("none", "transformers"):
            return {}
        lines: dict[str, Any] = {"use_vllm": True}
        if self.place == "server":
            return lines | {"vllm_mode": "server"}
        lines["vllm_gpu_memory_utilization"] = self.share_of(model, memory)
        if self.sleeps:
            lines["vllm_enable_sleep_mode"] = True
        if self.weights == "fp8":
            lines["vllm_engine_kwargs"] = {"quantization": _FP8}
        return lines


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run on one GPU: everything that its memory depends on."""

    model: Model
    memory: int  # bytes of the GPU
    tokens: int  # per micro-batch
    longest: int = 4096  # tokens of the longest sequence
    training: Training
    engine: Engine = Engine()
    reference: bool = False  # a frozen copy of the weights, for beta above 0
    implementation: str | None = None  # Call.name of the head; None: the trainer's choice
    two_pass: bool = False  # at the head
    offload: bool = False  # hidden states between layers in main memory
    tiled: bool = False  # MLPs in tiles

    @property
    def merges_into_rounded(self) -> bool:
        """Whether vLLM would need an adapter merged into 4-bit weights, an error in the trainer.

        vLLM does not apply adapters to models that take images.
        """
        quantized = self.training.linear == NF4
        return quantized and self.model.images and self.engine.samples_by_vllm

    def head(self, name: str) -> Call:
        """Return the loss call at the head: a schedule of grpo-kernels, ``trl`` or ``eager``."""
        return Call(
            name=name,
            hidden=self.model.hidden,
            vocabulary=self.model.vocabulary,
            tokens=self.tokens,
            weight_dtype=torch.float32 if self.training.cast else None,
            frozen=bool(self.training.rank),
            softcap=self.model.softcap,
        )

    def schedules(self) -> set[str]:
        """Return the schedules that may run at the head.

        vLLM's log-probabilities correct the loss per sequence, which needs two passes if a
        sequence is longer than a tile.
        """
        if self.implementation or self.two_pass:
            return {self.implementation or "two_pass"}
        default = {self.head("one_pass").default}
        return default | {"two_pass"} if self.engine.samples_by_vllm else default

    def settings(self) -> dict[str, Any]:
        """Return the planned settings, for the run file."""
        lines = dict(self.training.settings)
        if self.training.rank and self.model.adapted:
            lines["lora_target_modules"] = list(self.model.adapted)
        lines["max_tokens_per_micro_batch"] = self.tokens
        if self.model.attention is not None:
            lines["attn_implementation"] = self.model.attention
        if self.two_pass:
            lines["schedule"] = "two_pass"
        if self.offload:
            lines["gradient_checkpointing_kwargs"] = {"offload": True}
        if self.tiled:
            lines["mlp_tile_tokens"] = TILE
        return lines | self.engine.settings(self.model, self.memory)

    def head_bytes(self) -> int:
        """Return the peak bytes at the head, without its weight.

        The weight's gradient is counted here in addition to "gradients": with several
        micro-batches per step, it is computed next to the sum of the previous ones.
        """
        calls = [self.head(name) for name in self.schedules()]
        return max(total(call) - call.weight for call in calls)

    def resident_bytes(self) -> dict[str, int]:
        """Return the bytes on the GPU at all times, by name."""
        way = self.training
        model = self.model
        parts = {"weights": way.weights(model), "optimizer states": way.optimizer(model)}
        if self.reference and not way.rank:  # with LoRA, the model without adapter is the reference
            parts["reference model"] = model.parameters * way.weight
        return parts

    def step_bytes(self) -> dict[str, int]:
        """Return the additional bytes on the GPU at the peak of a step, by name."""
        return {
            "gradients": self.training.gradients(self.model),
            "activations": self.activation_bytes(),
            "attention masks": masks(self.model, self.tokens, self.longest),
            "LM head and loss": self.head_bytes(),
        }

    def host_bytes(self) -> int:
        """Return the bytes of pinned main memory for offloaded hidden states."""
        model = self.model
        per_token = len(model.layers) * model.hidden * self.training.state
        return self.tokens * per_token if self.offload else 0

    def activation_bytes(self) -> int:
        return activations(
            self.model,
            self.tokens,
            state=self.training.state,
            inside=self.training.inside,
            offload=self.offload,
            tile=TILE if self.tiled else None,
        )


@dataclass(frozen=True, kw_only=True)
class Moment:
    """The memory of the GPU, or of the engine's share, at one time."""

    name: str
    parts: dict[str, int]  # bytes by name
    limit: int

    @property
    def free(self) -> int:
        """Free bytes; below 0: bytes that do not fit."""
        return self.limit - sum(self.parts.values())


def moments(run: Run) -> list[Moment]:
    """Return the moments of a step when memory may run out."""
    engine = run.engine
    weights = run.engine.weight_bytes(run.model)
    training = run.resident_bytes() | run.step_bytes()
    if not engine.colocated:
        return [Moment(name="training", parts=training | _OF_CUDA, limit=run.memory)]
    share = int(engine.share_of(run.model, run.memory) * run.memory)
    of_engine = {"engine weights": min(share, weights), "engine KV cache": max(0, share - weights)}
    needed = {"engine weights": weights, "engine slack": ENGINE_SLACK}
    in_share = Moment(name="vLLM's share", parts=needed, limit=share)
    if not engine.sleeps:
        parts = training | of_engine | _OF_CUDA
        return [Moment(name="training", parts=parts, limit=run.memory), in_share]
    waking = run.resident_bytes() | of_engine | _OF_CUDA
    sent = _sent_at_once(run)
    if sent > waking["engine KV cache"]:  # the cache wakes after the weights have arrived
        del waking["engine KV cache"]
        waking["weights on their way"] = sent
    return [
        Moment(name="training", parts=training | _OF_CUDA, limit=run.memory),
        Moment(name="waking the engine", parts=waking, limit=run.memory),
        in_share,
    ]


def _sent_at_once(run: Run) -> int:
    """Return the bytes of weights in transfer to an engine that reloads layer by layer.

    With QLoRA the engine loads the base weights itself, and receives only the adapter.
    """
    model = run.model
    if run.training.linear == NF4:
        return 0
    layer = (model.linear + model.experts) // len(model.layers)
    return 2 * max(model.head, layer)


def missing(run: Run) -> int:
    """Return the bytes missing at the run's worst moment; 0: it fits."""
    return max(0, -min(moment.free for moment in moments(run)))


def largest(run: Run, *, one_sequence: bool = False) -> int:
    """Return the most tokens per micro-batch that fit, a multiple of :data:`STEP`; 0: none.

    ``one_sequence``: the micro-batch is a single sequence. Memory grows with the tokens.
    """

    def lacks(steps: int) -> int:
        tokens = steps * STEP
        longest = tokens if one_sequence else run.longest
        return missing(replace(run, tokens=tokens, longest=longest))

    return STEP * (bisect_left(range(1, _MOST_STEPS), True, key=lambda n: lacks(n) > 0))
