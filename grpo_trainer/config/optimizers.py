"""The optimizer that ``optim`` and ``optim_args`` select, as transformers creates it."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainingArguments
from transformers.trainer_optimizer import (
    _OPTIMIZER_HANDLERS,
    OptimizerContext,
    _parse_optim_args,
)

from grpo_trainer.common import hint


class _Noted(dict[str, str]):
    """Arguments of an optimizer; ``known`` collects the names that transformers looks up."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.known: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.known.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return super().get(name, default)

    def pop(self, name: str, default: Any = None) -> Any:
        self.known.add(name)
        return super().pop(name, default)


def optimizer_of(args: TrainingArguments) -> tuple[Any, dict[str, Any]]:
    """Return the class of the optimizer and its settings, without those of AdamW.

    Optimizers that find layers by ``optim_target_modules`` are created from the model later: for
    them it returns None and no settings.

    Raises:
        ValueError: its package is not installed, or it does not know one of ``optim_args``.
    """
    try:
        values = _parse_optim_args(args.optim_args)
    except ValueError:
        raise ValueError(
            f"optim_args: expected name=value,name=value, got {args.optim_args!r}"
        ) from None
    noted = _Noted(values)
    context = OptimizerContext(
        args=args, model=nn.Module(), optimizer_kwargs={}, adam_kwargs={}, optim_args=noted
    )
    kind, settings = None, {}
    try:
        kind, settings = _OPTIMIZER_HANDLERS[args.optim](context)
    except ImportError as error:
        raise ValueError(f"optim: {args.optim.value} needs a package: {error}") from error
    except ValueError as error:
        if args.optim_target_modules is None:  # else it found no layers in the empty module
            name = "optim_args" if values else "optim"
            raise ValueError(f"{name}: {args.optim.value}: {error}") from error
    if unknown := sorted(values.keys() - noted.known):
        known = sorted(noted.known)
        raise ValueError(
            f"optim_args: expected {', '.join(known) or 'none'} with optim={args.optim.value}, "
            f"got {', '.join(unknown)}{hint(unknown[0], known)}"
        )
    if isinstance(settings.get("block_size"), str):
        raise ValueError(
            "optim_args: expected no block_size, which this version of transformers passes to "
            f"torchao as text; set it in optimizer_cls_and_kwargs; got {settings['block_size']}"
        )
    check_weight_decay("optim_args", settings, args)
    return kind, settings


def check_weight_decay(name: str, settings: dict[str, Any], args: TrainingArguments) -> None:
    """Raise ValueError if an optimizer's settings have another ``weight_decay`` than ``args``, from
    which transformers forms the groups of weights."""
    own = settings.get("weight_decay", args.weight_decay)
    if own != args.weight_decay:
        raise ValueError(
            f"{name}: expected no weight_decay, got {own}; set weight_decay={own} in GRPOConfig, "
            "which applies to all groups of weights"
        )
