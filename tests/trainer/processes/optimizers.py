"""Optimizers of other libraries over two processes: replicas, shards, states in main memory."""

from __future__ import annotations

import copy
from functools import partial, wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torchao.optim.adam import _AdamW
from transformers import PreTrainedModel

from grpo_trainer import GRPOTrainer
from tests.support.placements import FSDP2, PLACEMENTS, rank
from tests.trainer.features import policy
from tests.trainer.processes.checks import assert_equal, refusal
from tests.trainer.processes.features import trainer_of, weights

ROUNDED = {"optim": "adamw_torch_8bit", "optim_args": "bf16_stochastic_round=True"}
ROUNDED_ADAMW = (_AdamW, {"bf16_stochastic_round": True})
_MOMENTS = {"exp_avg", "exp_avg_sq", "state1", "state2"}
SETTINGS = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "max_steps": 3}


def bf16() -> PreTrainedModel:
    return policy().bfloat16()


def offloaded(placement: str) -> dict[str, Any]:
    """Return the settings of a placement that keeps optimizer states in main memory."""
    if placement == "fsdp2":
        return {"fsdp_config": FSDP2["fsdp_config"] | {"cpu_offload": True}}
    config = copy.deepcopy(PLACEMENTS[placement]["deepspeed"])
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    return {"deepspeed": config}


def cast(placement: str) -> dict[str, Any]:
    """Return the settings of mixed precision, which casts the weights when they are placed."""
    settings: dict[str, Any] = {"optim": "adamw_torch", "bf16": True}
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
        "optimizer_cls_and_kwargs": ROUNDED_ADAMW, "model": bf16,
    },
    "in main memory": lambda placement: {"optim": "adamw_torch"} | offloaded(placement),
    "mixed precision": cast,
}  # fmt: skip


FP32, BF16 = "Tensor of torch.float32", "Tensor of torch.bfloat16"
BNB, AO = "Tensor of torch.uint8", "OptimState8bit"
# by placement, the ways that it may take, and what their states are made of
PLACED: dict[str, dict[str, set[str]]] = {
    "ddp": {
        "bitsandbytes": {FP32, BNB}, "torchao": {f"{AO} of torch.float32", FP32},
        "rounded": {f"{AO} of torch.bfloat16", BF16}, "rounded, plain states": {BF16},
    },
    "fsdp2": {"torchao": {f"{AO} of torch.float32", FP32}, "rounded, plain states": {BF16}},
    "zero2": {"bitsandbytes": {FP32, BNB}},
    "zero3": {"bitsandbytes": {FP32, BNB}},
}  # fmt: skip


def as_on_a_gpu(case: Any) -> Any:
    """Let torchao's steps run as they are written, and memory count as pinned without a GPU."""

    @wraps(case)
    def run(placement: str, folder: str) -> dict[str, Any]:
        pinned = patch.object(Tensor, "pin_memory", lambda self, *_: self)
        with torch.compiler.set_stance("force_eager"), pinned:
            case(placement, Path(folder))
        return {}

    return run


def train(way: str, placement: str, folder: Path, **changes: Any) -> GRPOTrainer:
    trainer = _trainer(way, placement, folder, **changes)
    torch.manual_seed(rank())  # as after completions of different lengths
    trainer.train()
    return trainer


def train_twice(way: str, placement: str, folder: Path) -> tuple[GRPOTrainer, dict[str, Tensor]]:
    """Train, and again from a checkpoint; return the trainer and the weights of the latter."""
    trainer = train(way, placement, folder, save_strategy="steps", save_steps=2)
    again = _trainer(way, placement, folder)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return trainer, weights(again)


def _trainer(way: str, placement: str, folder: Path, **changes: Any) -> GRPOTrainer:
    changes |= SETTINGS | WAYS[way](placement)
    return trainer_of("nothing", placement, folder, **changes)


@as_on_a_gpu
def small_states(placement: str, folder: Path) -> None:
    """Go the way of AdamW; a resumed run is the straight one, and replicas stay alike."""
    exact: dict[str, dict[str, Tensor]] = {}
    start = policy().state_dict()
    for way, made_of in PLACED[placement].items():
        trainer, resumed = train_twice(way, placement, folder / way)
        found = weights(trainer)
        assert_equal(resumed, found)
        assert states(trainer) == made_of, way
        if placement == "ddp":
            assert_replicated(trainer)
        twin = "adamw, bf16" if way.startswith("rounded") else "adamw"
        if twin not in exact:
            exact[twin] = weights(train(twin, placement, folder / twin))
        assert 0 < distance(found, exact[twin]) < distance(found, start) / 4, way


def assert_replicated(trainer: GRPOTrainer) -> None:
    for weight in trainer.model.parameters():
        others = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
        dist.all_gather(others, weight.detach())
        assert all(torch.equal(other, weight) for other in others)


def distance(found: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return float(sum((found[name].float() - other[name].float()).square().sum() for name in found))


@as_on_a_gpu
def in_main_memory(placement: str, folder: Path) -> None:
    """Without a GPU all is there: what is tested is that the settings reach the libraries."""
    trainer, resumed = train_twice("in main memory", placement, folder / "memory")
    exact = weights(train("adamw", placement, folder / "adamw"))
    for name, weight in weights(trainer).items():
        torch.testing.assert_close(weight, exact[name], rtol=0, atol=1e-5)
        # DeepSpeed's optimizer multiplies powers of beta up, which a resumed run computes anew
        atol = 0 if placement == "fsdp2" else 1e-6
        torch.testing.assert_close(resumed[name], weight, rtol=0, atol=atol)
    assert states(trainer) == {FP32}
    assert {weight.device.type for weight in trainer.model.parameters()} == {"cpu"}


@as_on_a_gpu
def weights_that_placing_casts(placement: str, folder: Path) -> None:
    """Go on from a checkpoint, which says what was loaded, so that a run loads the same."""
    trainer, resumed = train_twice("mixed precision", placement, folder)
    found = weights(trainer)
    dtype = torch.float32 if placement == "fsdp2" else torch.bfloat16
    assert {weight.dtype for weight in found.values()} == {dtype}
    assert_equal(resumed, found)


def states(trainer: GRPOTrainer) -> set[str]:
    """Return what the moments are made of, in which dtypes."""
    optimizer: Any = trainer.optimizer
    while hasattr(optimizer, "optimizer") and optimizer.optimizer is not None:
        optimizer = optimizer.optimizer
    found = set()
    for state in optimizer.state.values():
        for name in _MOMENTS & state.keys():
            value = getattr(state[name], "_local_tensor", state[name])
            found.add(f"{type(value).__name__} of {value.dtype}")
    return found


OF_TORCH = "optim: expected an optimizer of torch or torchao (adamw_torch_8bit) under FSDP2"
OF_BNB = "optim: expected an optimizer of torch or bitsandbytes (adamw_8bit) under DeepSpeed"
IN_BF16 = {"model": bf16, "optimizer_cls_and_kwargs": ROUNDED_ADAMW}
# what is asked, and the error under FSDP2 and under ZeRO-2; "nothing": it works
ASKED: list[tuple[dict[str, Any], str, str | None]] = [
    ({"optim": "adamw_8bit"}, OF_TORCH, "nothing"),
    ({"optim": "adafactor"}, OF_TORCH, "nothing"),
    ({"optim": "adamw_torch_8bit"}, "nothing", OF_BNB),
    ({"optim": "adamw_torch_4bit", "model": bf16}, "optim: expected float32 weights", None),
    (IN_BF16, "nothing", "bf16_stochastic_round: expected False under DeepSpeed"),
    (IN_BF16 | {"bf16": True}, "dtype=bfloat16), which it rounds; got float32", None),
]


def refused(placement: str, folder: str) -> dict[str, Any]:
    """Ask for optimizers that cannot update what a placement has."""
    for changes, under_fsdp2, under_zero2 in ASKED:
        message = under_fsdp2 if placement == "fsdp2" else under_zero2
        if message is not None:
            make = partial(trainer_of, "nothing", placement, folder, **changes)
            assert message in refusal(make), changes
    return {}
