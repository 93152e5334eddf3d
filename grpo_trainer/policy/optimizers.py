"""Optimizers of other libraries: checks of their limits, and stochastic rounding on replicas."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch.optim import Optimizer
from transformers import Adafactor, Trainer, TrainerCallback, TrainingArguments

from grpo_trainer.config import GRPOConfig, check_weight_decay, optimizer_of
from grpo_trainer.policy.placement import FullyShard, Placement, Zero

OptimizerClass = tuple[type[Optimizer], dict[str, Any]]  # and its arguments

_ROUNDS = "bf16_stochastic_round"  # torchao's name
_IN_BLOCKS = ("AdamW8bit", "AdamW4bit")  # torchao's


def with_learning_rate(
    chosen: OptimizerClass | None, optimizers: tuple[Any, Any], args: GRPOConfig
) -> OptimizerClass | None:
    """Return ``optimizer_cls_and_kwargs`` with ``learning_rate`` as ``lr``, unless it has an
    ``lr``.

    Raises:
        ValueError: it is not a class and a dictionary, or has a ``weight_decay`` that transformers
            would replace with the one of ``args``; or ``optimizers`` is given as well.
    """
    if chosen is None:
        return None
    name = "optimizer_cls_and_kwargs"
    kind, settings = chosen if isinstance(chosen, tuple) and len(chosen) == 2 else (None, None)
    if not isinstance(kind, type) or not isinstance(settings, dict):
        raise ValueError(f"{name}: expected a class and a dictionary, got {chosen!r}")
    if optimizers[0] is not None:
        raise ValueError(f"optimizers, {name}: expected one of them, got both")
    if issubclass(kind, Optimizer):  # other classes form their own groups of weights
        check_weight_decay(name, settings, args)
    return kind, {"lr": args.learning_rate} | settings


def check_optimizer(trainer: Trainer, placement: Placement) -> None:
    """Raise ValueError if the optimizer does not support the policy's weights or their placement;
    warn of settings that have no effect."""
    args = trainer.args
    name, kind, settings = _chosen(trainer)
    if name != "optim":
        defaults = {field: _default(args, field) for field in ("optim", "optim_args")}
        unused = [field for field, value in defaults.items() if getattr(args, field) != value]
        if unused:
            warnings.warn(f"{', '.join(unused)}: no effect with {name}", stacklevel=4)
    if kind is None:
        return
    if settings.get(_ROUNDS):
        _check_rounding(trainer, placement)
    if isinstance(placement, FullyShard):
        _check_shards(name, kind, torch.bfloat16 in _trained(trainer, placement))
    if isinstance(placement, Zero) and kind.__name__ in _IN_BLOCKS:
        raise ValueError(
            f"{name}: expected an optimizer of torch or bitsandbytes (adamw_8bit) under DeepSpeed, "
            f"which passes all weights to torchao's {kind.__name__} as one vector: its states "
            "would stay in float32 unless blocks divide the vector"
        )
    if kind.__name__ == "CPUOffloadOptimizer":
        _check_offload(args, name)


def _chosen(trainer: Trainer) -> tuple[str, Any, dict[str, Any]]:
    """Return the argument that selects the optimizer, its class and its settings."""
    if trainer.optimizer is not None:
        rounds = getattr(trainer.optimizer, _ROUNDS, False)
        return "optimizers", type(trainer.optimizer), {_ROUNDS: rounds}
    if trainer.optimizer_cls_and_kwargs is not None:
        return "optimizer_cls_and_kwargs", *trainer.optimizer_cls_and_kwargs
    return "optim", *optimizer_of(trainer.args)


def _default(args: TrainingArguments, name: str) -> Any:
    return type(args).__dataclass_fields__[name].default


def _trained(trainer: Trainer, placement: Placement) -> set[torch.dtype]:
    """Return the dtypes of the weights that the optimizer updates."""
    if isinstance(placement, FullyShard) and trainer.accelerator.mixed_precision != "no":
        return {torch.float32}  # accelerate casts them
    return {weight.dtype for weight in trainer.model.parameters() if weight.requires_grad}


def _check_shards(name: str, kind: type[Optimizer], bfloat16: bool) -> None:
    library = kind.__module__.partition(".")[0]
    if library == "bitsandbytes" or kind is Adafactor:
        raise ValueError(
            f"{name}: expected an optimizer of torch or torchao (adamw_torch_8bit) under FSDP2, "
            f"since {kind.__name__} of {library} cannot update its shards"
        )
    if bfloat16 and kind.__name__ in _IN_BLOCKS:
        raise ValueError(
            f"{name}: expected float32 weights for {kind.__name__} under FSDP2 (with "
            "mixed_precision=bf16 they still compute in bfloat16), got bfloat16 (dtype=bfloat16)"
        )


def _check_rounding(trainer: Trainer, placement: Placement) -> None:
    trained = _trained(trainer, placement)
    if trained == {torch.float32} and is_peft_model(trainer.model):
        raise ValueError(
            f"{_ROUNDS}: expected False with an adapter in float32, whose updates are not rounded "
            "(over a quantized base it is in bfloat16); got True"
        )
    if torch.bfloat16 not in trained:
        shown = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in trained))
        raise ValueError(
            f"{_ROUNDS}: expected False, or bfloat16 trained weights (dtype=bfloat16), which it "
            f"rounds; got {shown}"
        )
    if isinstance(placement, Zero):
        raise ValueError(
            f"{_ROUNDS}: expected False under DeepSpeed, which updates a float32 copy of the "
            "weights, got True"
        )


def _check_offload(args: GRPOConfig, name: str) -> None:
    if args.device.type not in ("cuda", "xpu"):
        raise ValueError(
            f"{name}: expected CPUOffloadOptimizer only with a GPU, got {args.device.type}"
        )
    if args.max_grad_norm > 0:
        raise ValueError(
            "max_grad_norm: expected 0 with CPUOffloadOptimizer, which copies the gradients before "
            f"they are clipped, got {args.max_grad_norm}"
        )


class AlikeRounding(TrainerCallback):
    """Makes processes that each have the whole policy round its weights identically.

    ``bf16_stochastic_round`` draws from torch's generator, which has a different state on each
    process. Without this callback, the copies of the policy would drift apart.
    """

    def __init__(self) -> None:
        self._step = ExitStack()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, **models: Any
    ) -> None:
        optimizer = models["optimizer"].optimizer  # inside accelerate's wrapper
        if getattr(optimizer, _ROUNDS, False):
            devices = [args.device] if args.device.type == "cuda" else []
            self._step.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(args.seed + state.global_step)

    def on_optimizer_step(
        self, args: TrainingArguments, state: Any, control: Any, **models: Any
    ) -> None:
        self._step.close()
