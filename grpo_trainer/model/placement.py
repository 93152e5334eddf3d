"""Where a run may happen."""

from __future__ import annotations

from transformers import Trainer


def check_placement(trainer: Trainer) -> None:
    """Raises ValueError unless every process has one device and the whole model."""
    if trainer.args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {trainer.args.n_gpu}; start with "
            "`accelerate launch` or set CUDA_VISIBLE_DEVICES"
        )
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError("fsdp, deepspeed: expected neither (rollouts need whole parameters)")
