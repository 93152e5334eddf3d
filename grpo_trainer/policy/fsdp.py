"""FSDP2: every parameter is a DTensor, and a unit gathers its own when it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_trainer.policy.placement import Placement


class FullyShard(Placement):
    """Parameters are sharded by ``fully_shard``, the way accelerate applies it."""

    name = "FSDP2"
    sharded = True
    late = True

    @property
    def whole_checkpoints(self) -> bool:
        return "FULL" in str(self._accelerator.state.fsdp_plugin.state_dict_type)

    def place(self, policy: nn.Module) -> bool:
        if isinstance(policy, FSDPModule):
            return False
        # accelerator.prepare asks for an optimizer, too; training makes one from this model
        fsdp2_prepare_model(self._accelerator, policy)
        self._accelerator._models.append(policy)  # as it does
        return True

    def frozen(self, model: nn.Module) -> nn.Module:
        return fsdp2_prepare_model(self._accelerator, model)

    @contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        units = _units(policy)
        if not units:  # not placed yet
            yield
            return
        # the root never frees its parameters after a forward: the backward begins with them
        frees = [unit is not policy and _frees(unit) for unit in units]
        policy.set_reshard_after_forward(False)  # type: ignore[operator]
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            for unit, value in zip(units, frees, strict=True):
                unit.set_reshard_after_forward(value, recurse=False)
                unit.reshard()

    def at_rest(self, model: nn.Module) -> None:
        for unit in _units(model):
            unit.reshard()

    def local(self, parameter: Tensor) -> Tensor:
        with torch.no_grad():
            return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()

    @contextmanager
    def _gathered(self, value: Tensor) -> Iterator[Tensor]:
        if not isinstance(value, DTensor):
            yield value
            return
        with torch.no_grad():  # offloaded parameters are gathered where the processes can talk
            there: Any = value.to(value.device_mesh.device_type)
            yield there.full_tensor()


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _frees(unit: Any) -> bool:
    """Return whether a unit frees its parameters after its forward."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group._reshard_after_forward for group in groups)
