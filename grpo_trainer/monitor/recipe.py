"""What a run is made of, in words: for its report and its model's card."""

from __future__ import annotations

import dataclasses
import platform
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import Trainer

from grpo_kernels import LossConfig
from grpo_kernels.tools import cpu_name, installed_version

_PACKAGES = (
    "grpo-kernels",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "vllm",
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The parts of a run that have names."""

    model: str  # folder or hub id it started from
    rewards: dict[str, float]  # name -> weight
    dataset: str | None  # as it was named, if it was
    prompts: int | None  # of the dataset; None: it is a stream
    adapter: str | None  # its kind, if only an adapter is trained
    loss_type: str
    loss_source: str  # the paper
    engine: str  # what completes the prompts
    processes: int

    @classmethod
    def of(cls, trainer: Trainer, rewards: dict[str, float], engine: str | None) -> Recipe:
        """Describe ``trainer``; ``engine`` names one that its arguments do not say."""
        args, model = trainer.args, trainer.model
        data = trainer.train_dataset
        adapter = None
        if is_peft_model(model):
            adapter = str(next(iter(model.peft_config.values())).peft_type.value)
        return cls(
            model=str(getattr(model.config, "_name_or_path", "") or type(model).__name__),
            rewards=rewards,
            dataset=None,
            prompts=len(data) if hasattr(data, "__len__") else None,
            adapter=adapter,
            loss_type=trainer.loss_config.loss_type,
            loss_source=trainer.loss_config.loss.source,
            engine=engine or _engine(args),
            processes=trainer.accelerator.num_processes,
        )


def changed_loss_fields(config: LossConfig) -> dict[str, Any]:
    """Return what of the loss, its surrogate's settings included, is not at its default."""
    return {
        item.name: getattr(part, item.name)
        for part in (config, config.surrogate)
        for item in dataclasses.fields(part)
        if item.compare and item.name != "surrogate" and getattr(part, item.name) != item.default
    }


def environment(device: torch.device) -> dict[str, str]:
    """Return the machine and the versions."""
    on_gpu = device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    versions = {name: installed_version(name) for name in _PACKAGES}
    return facts | {name: version for name, version in versions.items() if version is not None}


def _engine(args: Any) -> str:
    if args.rollout_engine is not None:
        return args.rollout_engine
    if args.use_vllm:
        return f"vLLM ({args.vllm_mode})"
    return "transformers"
