"""Which placement a run has, and what cannot be combined with it."""

from __future__ import annotations

from accelerate import Accelerator

from grpo_trainer.policy.placement import Placement


def placement_of(accelerator: Accelerator) -> Placement:
    """Return where the policy of a run is placed.

    Raises:
        ValueError: it is sharded by FSDP1.
    """
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if deepspeed is not None:
        from grpo_trainer.policy.zero import Zero, Zero3

        return (Zero3 if deepspeed.zero_stage == 3 else Zero)(accelerator)
    if fsdp is None:
        return Placement(accelerator)
    if fsdp.fsdp_version != 2:
        raise ValueError(
            "fsdp_version: expected 2 (FSDP2), got 1; set it in the file of `accelerate launch`, "
            "or version in fsdp_config"
        )
    from grpo_trainer.policy.fsdp import FullyShard

    return FullyShard(accelerator)
