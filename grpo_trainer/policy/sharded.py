"""A policy whose parameters or optimizer are sharded, by FSDP2 or DeepSpeed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_trainer.config import GRPOConfig
from grpo_trainer.policy.placement import Placement

# parts of DeepSpeed's configuration, wherever they stand
_OF_TRAINING = ("optimizer", "scheduler", "offload_optimizer")


def placement_of(accelerator: Accelerator) -> Placement:
    """Return where the policy of a run is placed.

    Raises:
        ValueError: it is sharded by FSDP1.
    """
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if deepspeed is not None:
        return (Zero3 if deepspeed.zero_stage == 3 else Zero)(accelerator)
    if fsdp is None:
        return Placement(accelerator)
    if fsdp.fsdp_version != 2:
        raise ValueError(
            "fsdp_version: expected 2 (FSDP2), got 1; set it in the file of `accelerate launch`, "
            "or version in fsdp_config"
        )
    return FullyShard(accelerator)


def check_placement(args: GRPOConfig, accelerator: Accelerator) -> None:
    """Raise ValueError unless every process has one device, and a placement that fits ``args``."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {args.n_gpu}; start with `accelerate launch` or "
            "set CUDA_VISIBLE_DEVICES"
        )
    if accelerator.parallelism_config is not None:
        sizes = {
            name: getattr(accelerator.parallelism_config, f"{name}_size", 1)
            for name in ("tp", "cp", "sp")
        }
        wrong = ", ".join(f"{name}_size={size}" for name, size in sizes.items() if size > 1)
        if wrong:
            raise ValueError(
                f"parallelism_config: expected data parallelism alone (each process has whole "
                f"sequences and whole layers), got {wrong}"
            )
    for name, plugin in {"fsdp": args.fsdp_plugin_args, "deepspeed": args.deepspeed_plugin}.items():
        # by a field, or by the launcher's file
        is_set = plugin is not None or parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}")
        if is_set and getattr(accelerator.state, f"{name}_plugin", None) is None:
            raise ValueError(
                f"{name}: expected processes that accelerate shards a model over, with a GPU each, "
                f"got {accelerator.distributed_type.value}, where it would have no effect"
            )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if args.cast_lm_head_to_fp32 and sharded and accelerator.mixed_precision != "no":
        raise ValueError(
            "cast_lm_head_to_fp32: expected False under FSDP and DeepSpeed with mixed_precision="
            f"{accelerator.mixed_precision!r}, which compute in that dtype in all layers; got True"
        )


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


class Zero(Placement):
    """Parameters are whole, in an engine that steps the optimizer in its backward."""

    name = "ZeRO"
    late = True

    def runs(self, policy: nn.Module) -> nn.Module:
        engine = self._engine(policy)
        return policy if engine is None else engine

    def place(self, policy: nn.Module) -> bool:
        """Return False: training has placed the policy.

        Raises:
            ValueError: it has not, and an engine that is made without an optimizer gets none later.
        """
        if self._engine(policy) is None:
            raise ValueError(
                "evaluate: expected it during or after train under DeepSpeed, whose engine is made "
                "there; eval_on_start evaluates before the first step"
            )
        return False

    def frozen(self, model: nn.Module) -> nn.Module:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=self._config())
        engine.eval()  # returns nothing
        return engine

    def _config(self) -> dict[str, Any]:
        """Return the run's configuration for a model without an optimizer."""
        config = _without(self._accelerator.state.deepspeed_plugin.deepspeed_config)
        return config if self.sharded else config | {"zero_optimization": {"stage": 0}}

    def _engine(self, policy: nn.Module) -> Any | None:
        wrapped = self._accelerator.deepspeed_engine_wrapped
        engine = None if wrapped is None else wrapped.engine
        return engine if engine is not None and engine.module is policy else None


class Zero3(Zero):
    """A parameter is empty but in the modules that run, and its shard lies beside it."""

    name = "ZeRO-3"
    sharded = True

    @property
    def whole_checkpoints(self) -> bool:
        zero = self._accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        return bool(zero.get("stage3_gather_16bit_weights_on_model_save", False))

    def copied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model that may have been sharded while it was loaded."""
        fresh = {id(value): self._copied(value) for value in model.parameters() if _is_shard(value)}
        return copy.deepcopy(model, fresh)

    @contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(policy.parameters())), _without_hooks(policy):
            yield

    def at_rest(self, model: nn.Module) -> None:
        from deepspeed.runtime.zero import ZeroParamStatus

        parameters: Iterator[Any] = model.parameters()
        for parameter in parameters:  # small ones stay gathered between forwards
            if _is_shard(parameter) and parameter.ds_status == ZeroParamStatus.AVAILABLE:
                parameter.partition()

    def local(self, parameter: Any) -> Tensor:
        return parameter.ds_tensor.detach() if _is_shard(parameter) else parameter.detach()

    def _stored(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict(keep_vars=True)

    def _shape(self, value: Any) -> torch.Size:
        return value.ds_shape if _is_shard(value) else value.shape

    @contextmanager
    def _gathered(self, value: Tensor) -> Iterator[Tensor]:
        from deepspeed.runtime.zero import GatheredParameters

        if not _is_shard(value):
            yield value.detach()
            return
        with GatheredParameters([value]):
            yield value.data

    def _copied(self, parameter: Tensor) -> nn.Parameter:
        import deepspeed

        copied = nn.Parameter(self._cloned(parameter), requires_grad=parameter.requires_grad)
        deepspeed.zero.Init(module=nn.ParameterList([copied]), config_dict_or_path=self._config())
        return copied


def _is_shard(value: Any) -> bool:
    return hasattr(value, "ds_id")


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is about training, and what is left to DeepSpeed's defaults."""
    return {
        name: _without(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in config.items()
        if value != "auto" and name not in _OF_TRAINING
    }


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Take DeepSpeed's hooks off the forwards of ``model``.

    They would free parameters after their use, and the first one waits for all processes, of which
    each generates as long as it has to. (``deepspeed.runtime.zero.unwrap_model_for_generation``
    leaves that one on.)
    """
    kept = []
    for module in model.modules():
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(module, name)
            others = {k: h for k, h in hooks.items() if not h.__module__.startswith("deepspeed.")}
            kept.append((module, name, hooks))
            setattr(module, name, OrderedDict(others))
    try:
        yield
    finally:
        for module, name, hooks in kept:
            setattr(module, name, hooks)
