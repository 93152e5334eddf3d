"""Which activations are kept: checks gradient checkpointing before a model is loaded."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, TrainingArguments

from grpo_kernels.common import check_name
from grpo_trainer.config.fields import expect, number, options

_boolean = expect("True or False", lambda value: isinstance(value, bool))
# arguments of transformers, by the first version that has them
_SINCE = {"every_n_layers": "5.16", "offload": "5.17"}
_RULES = {
    "every_n_layers": number(1, whole=True),
    **dict.fromkeys(("offload", "use_reentrant", "preserve_rng_state", "early_stop"), _boolean),
}


def check_checkpointing(args: TrainingArguments) -> None:
    """Raise ValueError unless gradient checkpointing accepts its arguments, and is on if it has
    any.

    Call it before both names of a setting get its value: errors then use the name that is set.
    """
    name = _set_name(args, "_checkpointing_kwargs")
    switch = _set_name(args, "_checkpointing")
    arguments = options(name, getattr(args, name))
    if arguments and getattr(args, switch) is False:
        raise ValueError(
            f"{name}: expected None with {switch}=False, which stores all activations, "
            f"got {arguments!r}"
        )
    for key, value in arguments.items():
        check_name(name, key, [*_of_torch(), *_SINCE])
        if key in _SINCE and key not in _of_transformers():
            raise ValueError(
                f"{name}[{key!r}]: expected transformers>={_SINCE[key]} with it, got "
                f"{transformers.__version__}; upgrade transformers, or leave it out"
            )
        if key in _RULES:
            _RULES[key](f"{name}[{key!r}]", value)
    if arguments.get("offload") and not torch.accelerator.is_available():
        raise ValueError(
            f"{name}['offload']: expected False without a GPU, since activations are in main "
            "memory already, got True"
        )


def keep_not_reentrant(args: TrainingArguments) -> None:
    """Set ``use_reentrant`` to False in arguments that omit it: the default without arguments.

    Torch's own default is True, which ignores some arguments. Call it when both names of the
    setting have its value.
    """
    if args.gradient_checkpointing_kwargs is None:
        return
    arguments = {"use_reentrant": False} | args.gradient_checkpointing_kwargs
    args.gradient_checkpointing_kwargs = args.activation_checkpointing_kwargs = arguments


def _set_name(args: TrainingArguments, ending: str) -> str:
    older, newer = f"gradient{ending}", f"activation{ending}"
    return newer if getattr(args, older) is None else older


def _of_torch() -> list[str]:
    parameters = inspect.signature(checkpoint).parameters.values()
    names = [item.name for item in parameters if item.kind is item.KEYWORD_ONLY]
    return [*names, "preserve_rng_state"]  # not in the signature


def _of_transformers() -> set[str]:
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    methods: list[Any] = [getattr(PreTrainedModel, name, None) for name in names]
    return {name for method in methods if method for name in inspect.signature(method).parameters}
