"""Where the parameters of a policy are, and how they are read there."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers.integrations import deepspeed


class Placement:
    """Every process has the whole policy. Subclasses say what differs where it is sharded.

    All processes call every method at the same time, unless it says otherwise.
    """

    name: str | None = None  # of how it is sharded
    sharded = False  # a process alone cannot read the parameters
    late = False  # training places the policy when it begins, and then loads a checkpoint

    @property
    def whole_checkpoints(self) -> bool:
        """Whether a checkpoint has the whole model, beside what a run resumes from."""
        return True

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator: Any = accelerator

    def runs(self, policy: nn.Module) -> nn.Module:
        """Return what is called to run ``policy`` forward; no communication."""
        return policy

    def place(self, policy: nn.Module) -> bool:
        """Put a policy where it can be evaluated; return False if it is there."""
        return False

    def frozen(self, model: nn.Module) -> nn.Module:
        """Return ``model``, which is never trained, placed as the policy is."""
        return self._accelerator.prepare_model(model, evaluation_mode=True)

    def copied(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model that was not placed yet."""
        return copy.deepcopy(model)

    @contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        """Hold all parameters on every process, so that each may run the policy by itself."""
        yield

    def at_rest(self, model: nn.Module) -> None:
        """Free what a forward has left gathered: ``parameters()`` are the trained ones again."""

    def weights(
        self, module: nn.Module, chosen: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors of ``module.state_dict()``, those that are ``chosen`` by
        their names, one after the other."""
        for name, value in self._stored(module).items():
            if not chosen(name):
                continue
            with self._gathered(value) as whole:
                yield name, whole
                del whole  # or it would live as long as the next one is gathered

    def saved(self, module: nn.Module, chosen: Callable[[str], bool]) -> dict[str, Tensor]:
        """Return :meth:`weights` in the main memory of the first process; others get none."""
        kept = {}
        for name, value in self.weights(module, chosen):
            if self._accelerator.is_main_process:
                kept[name] = value.detach().to("cpu", copy=True)
        return kept

    def described(self, module: nn.Module) -> dict[str, Tensor]:
        """Return ``module.state_dict()`` without values, on the meta device; no communication."""
        return {
            name: torch.empty(self._shape(value), dtype=value.dtype, device="meta")
            for name, value in self._stored(module).items()
        }

    def local(self, parameter: Tensor) -> Tensor:
        """Return the part of ``parameter`` that this process holds; no communication."""
        return parameter.detach()

    def whole_copy(self, module: nn.Module) -> Any:
        """Return a copy of a small module with whole parameters, and without hooks."""
        twin: nn.Module = object.__new__(type(module))  # classes of wrappers have no other copy
        for name, value in vars(module).items():
            if name.endswith("_hooks"):
                value = OrderedDict()
            vars(twin)[name] = list(value) if isinstance(value, list) else value
        twin._parameters = {
            name: None if value is None else nn.Parameter(self._cloned(value), requires_grad=False)
            for name, value in module._parameters.items()
        }
        twin._buffers = dict(module._buffers)
        twin._modules = {
            name: None if child is None else self.whole_copy(child)
            for name, child in module._modules.items()
        }
        return twin

    def _stored(self, module: nn.Module) -> dict[str, Any]:
        return module.state_dict()

    def _shape(self, value: Tensor) -> torch.Size:
        return value.shape

    @contextmanager
    def _gathered(self, value: Tensor) -> Iterator[Tensor]:
        yield value

    def _cloned(self, parameter: Tensor) -> Tensor:
        with self._gathered(parameter) as whole:
            return whole.detach().clone()


WHOLE = Placement()


_EFFICIENT = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def loading_whole() -> Iterator[None]:
    """Let ``from_pretrained`` load every weight on every process.

    ZeRO-3 shards what is loaded, and with ``fsdp_cpu_ram_efficient_loading`` only the first process
    has weights: both are right for the policy alone.
    """
    config, efficient = deepspeed._hf_deepspeed_config_weak_ref, os.environ.pop(_EFFICIENT, None)
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = config
        if efficient is not None:
            os.environ[_EFFICIENT] = efficient
