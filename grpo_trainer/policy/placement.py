"""Where a policy's parameters are: whole on each process, or sharded by FSDP2 or DeepSpeed."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import parse_flag_from_env
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.integrations import deepspeed as of_deepspeed

from grpo_trainer.config import GRPOConfig

# parts of DeepSpeed's configuration, at any level
_OF_TRAINING = ("optimizer", "scheduler", "offload_optimizer")
_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


class Placement:
    """Every process has the whole policy. Subclasses override what differs if it is sharded.

    All processes call every method at the same time, unless its docstring says otherwise.
    """

    name: str | None = None  # of the sharding method
    sharded = False  # whether a single process cannot read all parameters
    late = False  # whether training places the policy at its start, and then loads a checkpoint
    unsynced = True  # whether gradients stay on their process until a step's last backward

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator: Any = accelerator

    @property
    def whole_checkpoints(self) -> bool:
        """Whether a checkpoint also has the whole model, which resuming does not need."""
        return True

    def runs(self, policy: nn.Module) -> nn.Module:
        """Return the module to call for a forward of ``policy``; no communication."""
        return policy

    def place(self, policy: nn.Module) -> bool:
        """Place a policy so that it can be evaluated; return False if it is already placed."""
        return False

    def frozen(self, model: nn.Module) -> nn.Module:
        """Return ``model``, which is never trained, placed like the policy."""
        return self._accelerator.prepare_model(model, evaluation_mode=True)

    def copied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model that is not placed yet."""
        return copy.deepcopy(model)

    def whole(self, policy: nn.Module) -> AbstractContextManager[None]:
        """Hold all parameters on every process, so that each can run the policy independently."""
        return nullcontext()

    def at_rest(self, model: nn.Module) -> None:
        """Free parameters that a forward left gathered, so that ``parameters()`` are trained
        ones."""

    @contextmanager
    def accumulating(self, policy: nn.Module) -> Iterator[None]:
        """Treat no backward inside as the last of an optimizer step, as transformers does."""
        state = self._accelerator.gradient_state
        last = state.sync_gradients  # else transformers has already set it
        waits = last and self.unsynced and not state.plugin_kwargs.get("sync_each_batch", False)
        state._set_sync_gradients(False)
        with self._accelerator.no_sync(policy) if waits else nullcontext():
            yield
        state._set_sync_gradients(last)

    def weights(
        self, module: nn.Module, chosen: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors of ``module.state_dict()``, one by one; ``chosen`` selects
        names."""
        for name, value in module.state_dict(keep_vars=True).items():
            if chosen(name):
                with self._gathered(value) as whole:
                    yield name, whole
                    del whole  # else it stays in memory while the next one is gathered

    def saved(self, module: nn.Module, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
        """Return :meth:`weights` in CPU memory on the first process; others get none."""
        kept = {}
        for name, value in self.weights(module, chosen):
            if self._accelerator.is_main_process:
                kept[name] = value.detach().to("cpu", copy=True)
        return kept

    def described(self, module: nn.Module) -> dict[str, Tensor]:
        """Return ``module.state_dict()`` without values, on the meta device; no communication."""
        return {  # ZeRO-3 shards have the whole shape under another name
            name: torch.empty(
                getattr(value, "ds_shape", value.shape), dtype=value.dtype, device="meta"
            )
            for name, value in module.state_dict(keep_vars=True).items()
        }

    def local(self, parameter: Tensor) -> Tensor:
        """Return the part of ``parameter`` on this process; no communication."""
        return parameter.detach()

    def whole_copy(self, module: nn.Module) -> Any:
        """Return a copy of a small module with whole parameters and without hooks."""
        twin: Any = object.__new__(type(module))  # wrappers' classes cannot be copied otherwise
        for name, value in vars(module).items():
            kept = copy.copy(value) if isinstance(value, list | dict) else value
            vars(twin)[name] = OrderedDict() if name.endswith("_hooks") else kept
        for name, value in module._parameters.items():
            if value is not None:
                twin._parameters[name] = nn.Parameter(self._cloned(value), requires_grad=False)
        for name, child in module._modules.items():
            if child is not None:
                twin._modules[name] = self.whole_copy(child)
        return twin

    @contextmanager
    def _gathered(self, value: Tensor) -> Iterator[Tensor]:
        yield value.detach()

    def _cloned(self, parameter: Tensor) -> Tensor:
        with self._gathered(parameter) as whole:
            return whole.detach().clone()


WHOLE = Placement()


class FullyShard(Placement):
    """Parameters are sharded by ``fully_shard``, as accelerate applies it."""

    name = "FSDP2"
    sharded = True
    late = True

    @property
    def whole_checkpoints(self) -> bool:
        return "FULL" in str(self._accelerator.state.fsdp_plugin.state_dict_type)

    def place(self, policy: nn.Module) -> bool:
        if isinstance(policy, FSDPModule):
            return False
        # accelerator.prepare also needs an optimizer; training creates one from this model
        fsdp2_prepare_model(self._accelerator, policy)
        self._accelerator._models.append(policy)  # as prepare does
        return True

    def frozen(self, model: nn.Module) -> nn.Module:
        return fsdp2_prepare_model(self._accelerator, model)

    @contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        units = _units(policy)
        if not units:  # not placed yet
            yield
            return
        # the root keeps its parameters after a forward, since the backward begins with them
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
        with torch.no_grad():
            if isinstance(value, DTensor):  # if offloaded, gather on the communication device
                there: Any = value.to(value.device_mesh.device_type)
                value = there.full_tensor()
            yield value.detach()


def _units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _frees(unit: Any) -> bool:
    """Return whether a unit frees its parameters after its forward."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return any(group is not None and group._reshard_after_forward for group in groups)


class Zero(Placement):
    """An engine steps the optimizer in its backward. In stage 3, a parameter is empty except in
    running modules, and its shard is a separate attribute."""

    late = True
    unsynced = False

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self._plugin: Any = accelerator.state.deepspeed_plugin
        self.sharded = self._plugin.zero_stage == 3
        self.name = "ZeRO-3" if self.sharded else "ZeRO"

    @property
    def whole_checkpoints(self) -> bool:
        zero = self._plugin.deepspeed_config["zero_optimization"]
        return not self.sharded or bool(zero.get("stage3_gather_16bit_weights_on_model_save"))

    def runs(self, policy: nn.Module) -> nn.Module:
        engine = self._engine(policy)
        return policy if engine is None else engine

    def place(self, policy: nn.Module) -> bool:
        """Return False: training has already placed the policy.

        Raises:
            ValueError: it has not, and an engine created without an optimizer cannot get one later.
        """
        if self._engine(policy) is None:
            raise ValueError(
                "evaluate: expected a call during or after train under DeepSpeed, since train "
                "creates the engine; eval_on_start evaluates before the first step"
            )
        return False

    def frozen(self, model: nn.Module) -> nn.Module:
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=self._config())
        engine.eval()  # returns nothing
        return engine

    def copied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model that may have been sharded while it was loaded."""
        import deepspeed

        fresh: dict[int, Any] = {}
        for value in model.parameters():
            if _is_shard(value):
                whole = nn.Parameter(self._cloned(value), requires_grad=value.requires_grad)
                kept = nn.ParameterList([whole])
                deepspeed.zero.Init(module=kept, config_dict_or_path=self._config())
                fresh[id(value)] = whole
        return copy.deepcopy(model, fresh)

    @contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        from deepspeed.runtime.zero import GatheredParameters

        gathered = GatheredParameters(list(policy.parameters()), enabled=self.sharded)
        with gathered, _without_hooks(policy) if self.sharded else nullcontext():
            yield

    def at_rest(self, model: nn.Module) -> None:
        shards: Iterator[Any] = filter(_is_shard, model.parameters())
        for parameter in shards:  # small parameters stay gathered between forwards
            if parameter.ds_status.name == "AVAILABLE":
                parameter.partition()

    def local(self, parameter: Any) -> Tensor:
        return getattr(parameter, "ds_tensor", parameter).detach()

    @contextmanager
    def _gathered(self, value: Tensor) -> Iterator[Tensor]:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([value], enabled=_is_shard(value)):
            yield value.detach()

    def _config(self) -> dict[str, Any]:
        """Return the run's configuration for a model without an optimizer."""
        config = _without(self._plugin.deepspeed_config)
        return config if self.sharded else config | {"zero_optimization": {"stage": 0}}

    def _engine(self, policy: nn.Module) -> Any | None:
        wrapped = self._accelerator.deepspeed_engine_wrapped
        engine = None if wrapped is None else wrapped.engine
        return engine if engine is not None and engine.module is policy else None


def _is_shard(value: Any) -> bool:
    return hasattr(value, "ds_id")


def _without(config: dict[str, Any]) -> dict[str, Any]:
    """Remove settings about training, and settings left to DeepSpeed's defaults."""
    return {
        name: _without(value) if isinstance(value, dict) else copy.deepcopy(value)
        for name, value in config.items()
        if value != "auto" and name not in _OF_TRAINING
    }


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Remove DeepSpeed's hooks from the forwards of ``model``.

    They would free parameters after use, and the first hook waits for all processes, but each
    process generates for a different time. (``deepspeed.runtime.zero.unwrap_model_for_generation``
    does not remove the first hook.)
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


def placement_of(accelerator: Accelerator) -> Placement:
    """Return the placement of a run's policy; ValueError for FSDP1."""
    zero = getattr(accelerator.state, "deepspeed_plugin", None)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if zero is not None:
        return Zero(accelerator)
    if fsdp is None:
        return Placement(accelerator)
    if fsdp.fsdp_version != 2:
        raise ValueError(
            "fsdp_version: expected 2 (FSDP2), got 1; set it in the file for `accelerate launch`, "
            "or version in fsdp_config"
        )
    return FullyShard(accelerator)


def check_placement(args: GRPOConfig, accelerator: Accelerator) -> None:
    """Raise ValueError unless every process has one device, and the placement fits ``args``."""
    if args.n_gpu > 1:
        raise ValueError(
            f"expected one GPU per process, got {args.n_gpu}; start with `accelerate launch` or "
            "set CUDA_VISIBLE_DEVICES"
        )
    sizes = {
        name: getattr(accelerator.parallelism_config, name, 1)
        for name in ("tp_size", "cp_size", "sp_size")
    }
    wrong = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if wrong:
        raise ValueError(
            f"parallelism_config: expected only data parallelism (each process has whole "
            f"sequences and whole layers), got {wrong}"
        )
    for name, plugin in {"fsdp": args.fsdp_plugin_args, "deepspeed": args.deepspeed_plugin}.items():
        # set by a field, or in the launcher's file
        is_set = plugin is not None or parse_flag_from_env(f"ACCELERATE_USE_{name.upper()}")
        if is_set and getattr(accelerator.state, f"{name}_plugin", None) is None:
            raise ValueError(
                f"{name}: expected processes with a GPU each, over which accelerate shards a "
                f"model, got {accelerator.distributed_type.value}, where it would have no effect"
            )
    sharded = accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
    if args.cast_lm_head_to_fp32 and sharded and accelerator.mixed_precision != "no":
        raise ValueError(
            "cast_lm_head_to_fp32: expected False under FSDP and DeepSpeed with mixed_precision="
            f"{accelerator.mixed_precision!r}, which use that dtype in all layers, got True"
        )


@contextmanager
def loading_whole() -> Iterator[None]:
    """Let ``from_pretrained`` load every weight on every process.

    ZeRO-3 shards models while they are loaded, and with ``fsdp_cpu_ram_efficient_loading`` only the
    first process has weights. Both work only for the policy.
    """
    config, efficient = of_deepspeed._hf_deepspeed_config_weak_ref, os.environ.pop(_EFFICIENT, None)
    of_deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        of_deepspeed._hf_deepspeed_config_weak_ref = config
        if efficient is not None:
            os.environ[_EFFICIENT] = efficient
