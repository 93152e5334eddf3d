"""DeepSpeed: ZeRO-1 and 2 shard the optimizer, ZeRO-3 the parameters as well."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_trainer.policy.placement import Placement

_OF_TRAINING = ("optimizer", "scheduler")  # parts of the configuration


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
        given = _without_auto(
            copy.deepcopy(self._accelerator.state.deepspeed_plugin.deepspeed_config)
        )
        config = {name: value for name, value in given.items() if name not in _OF_TRAINING}
        zero = {k: v for k, v in config["zero_optimization"].items() if k != "offload_optimizer"}
        return config | {"zero_optimization": zero if self.sharded else {"stage": 0}}

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


def _without_auto(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out what the configuration leaves open: DeepSpeed has defaults for it."""
    return {
        name: _without_auto(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if value != "auto"
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
