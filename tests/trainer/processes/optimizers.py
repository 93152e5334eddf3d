"""Processes that train by optimizers of other libraries; each is called on all of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo_trainer import GRPOTrainer
from grpo_trainer.policy import placement_of
from tests.support.placements import FSDP2, PLACEMENTS, rank
from tests.trainer.processes.checks import refusal
from tests.trainer.processes.features import make_trainer, plain, weights

Found = dict[str, Any]
ROUNDED = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
_MOMENTS = {"exp_avg", "exp_avg_sq", "state1", "state2"}
SETTINGS = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "max_steps": 3}


def bf16() -> PreTrainedModel:
    return plain().bfloat16()


def rounded_adamw() -> tuple[Any, dict[str, Any]]:
    from torchao.optim.adam import _AdamW

    return _AdamW, {"bf16_stochastic_round": True}


def offloaded(placement: str) -> Found:
    """Return the settings of a placement that keeps optimizer states in main memory."""
    if placement == "fsdp2":
        return {"fsdp_config": FSDP2["fsdp_config"] | {"cpu_offload": True}}
    config = copy.deepcopy(PLACEMENTS[placement]["deepspeed"])
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {"deepspeed": config}


def cast(placement: str) -> Found:
    """Return the settings of mixed precision, which casts the weights when they are placed."""
    settings: Found = {"optim": "adamw_torch", "bf16": True}
    if placement == "fsdp2":
        return settings | {"model": bf16}
    return settings | {
        "deepspeed": PLACEMENTS[placement]["deepspeed"] | {"bf16": {"enabled": True}}
    }


WAYS: dict[str, Any] = {
    "adamw": lambda placement: {"optim": "adamw_torch"},
    "adamw, bf16": lambda placement: {"optim": "adamw_torch", "model": bf16},
    "bitsandbytes": lambda placement: {"optim": "adamw_8bit"},
    "torchao": lambda placement: {"optim": "adamw_torch_8bit"},
    "rounded": lambda placement: ROUNDED | {"model": bf16},
    "rounded, plain states": lambda placement: {
        "optimizer_cls_and_kwargs": rounded_adamw(), "model": bf16,
    },
    "in main memory": lambda placement: {"optim": "adamw_torch"} | offloaded(placement),
    "mixed precision": cast,
}  # fmt: skip


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Let torchao's steps run as they are written, and memory count as pinned without a GPU."""
    pinned = patch.object(Tensor, "pin_memory", lambda self, *_: self)
    with torch.compiler.set_stance("force_eager"), pinned:
        yield


def run(way: str, placement: str, folder: str) -> Found:
    """Train, and again from a checkpoint; return weights and the optimizer's states."""
    with _as_on_a_gpu():
        trainer = _trainer(way, placement, folder, save_strategy="steps", save_steps=2)
        torch.manual_seed(rank())  # as after completions of different lengths
        trainer.train()
        again = _trainer(way, placement, folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        place = placement_of(trainer.accelerator)
        own = [place.local(weight).clone() for weight in trainer.model.parameters()]
        return {
            "own": own,
            "weights": weights(trainer),
            "resumed": weights(again),
            "states": states(trainer),
            "devices": sorted({weight.device.type for weight in trainer.model.parameters()}),
        }


def _trainer(way: str, placement: str, folder: str, **changes: Any) -> GRPOTrainer:
    changes |= SETTINGS | WAYS[way](placement)
    return make_trainer("nothing", placement, folder, **changes)


def states(trainer: GRPOTrainer) -> list[str]:
    """Return what the moments are made of, in which dtypes."""
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer") and optimizer.optimizer is not None:
        optimizer = optimizer.optimizer
    found = set()
    for state in optimizer.state.values():
        for name in _MOMENTS & state.keys():
            value = getattr(state[name], "_local_tensor", state[name])
            found.add(f"{type(value).__name__} of {value.dtype}")
    return sorted(found)


def refused(placement: str, folder: str) -> Found:
    """Ask for optimizers that cannot update what a placement has; return the errors."""
    asked: dict[str, Found] = {
        "bitsandbytes": {"optim": "adamw_8bit"},
        "adafactor": {"optim": "adafactor"},
        "torchao": {"optim": "adamw_torch_8bit"},
        "torchao, bf16": {"optim": "adamw_torch_4bit", "model": bf16},
        "rounded": {"optimizer_cls_and_kwargs": rounded_adamw(), "model": bf16},
        "rounded in mixed precision": {
            "optimizer_cls_and_kwargs": rounded_adamw(), "model": bf16, "bf16": True,
        },
    }  # fmt: skip
    return {
        name: refusal(lambda: make_trainer("nothing", placement, folder, **changes))  # noqa: B023
        for name, changes in asked.items()
    }
