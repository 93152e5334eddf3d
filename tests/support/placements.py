"""Where the parameters of a trainer's policy are: settings of GRPOConfig for each placement."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, DistributedType, PartialState

FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
    },
    "accelerator_config": {"use_configured_state": True},
}


def _zero(stage: int) -> dict[str, Any]:
    config = {
        # small parameters would stay whole
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
    return {"deepspeed": config}


PLACEMENTS: dict[str, dict[str, Any]] = {
    "one": {},
    "ddp": {"ddp_backend": "gloo"},
    "fsdp2": FSDP2,
    **{f"zero{stage}": _zero(stage) for stage in (1, 2, 3)},
}


def prepare(placement: str) -> dict[str, Any]:
    """Make this process ready for a trainer in a placement; return the settings that ask for it.

    accelerate shards over GPUs alone: on CPUs it has to be told that these are as good.
    """
    AcceleratorState._reset_state(reset_partial_state=True)  # of the run before
    if placement == "fsdp2":
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
    if placement.startswith("zero"):
        import deepspeed  # accelerate does this where there are GPUs

        deepspeed.init_distributed("gloo")
    return PLACEMENTS[placement]


def processes() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))
