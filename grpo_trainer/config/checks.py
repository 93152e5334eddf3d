"""How GRPOConfig is checked: each field by the rules in its annotation, in one loop."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints
from urllib.parse import urlsplit

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_kernels.arguments import check_name, check_number
from grpo_trainer.common import masked_text, masked_url

Rule = Callable[[str, Any], None]  # takes the name of a field and its value

# for a field that is true or false and None by default: a flag without a value is true
FLAG = {"nargs": "?", "const": True}


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field; ``metadata`` is for its argument on the command line."""
    return field(default=default, metadata={"help": text, **metadata})


def number_in(expected: str, accepts: Callable[[float], bool]) -> Rule:
    """Return the rule of a finite number as expected."""
    return lambda name, value: check_number(name, value, expected, accepts)


def number(low: float, high: float = math.inf, above: bool = False) -> Rule:
    """Return the rule of a number in [low, high], or with ``above`` in (low, high]."""
    return number_in(
        f"a number {'>' if above else '>='} {low:g}" + _up_to(high),
        lambda value: low <= value <= high and not (above and value == low),
    )


def integer(low: int, high: float = math.inf) -> Rule:
    """Return the rule of an integer in [low, high]."""
    return number_in(
        f"an integer >= {low}" + _up_to(high),
        lambda value: isinstance(value, int) and low <= value <= high,
    )


def _up_to(high: float) -> str:
    return f" and <= {high:g}" if math.isfinite(high) else ""


def choice(names: Collection[str]) -> Rule:
    """Return the rule of a field that is one of ``names``."""
    return lambda name, value: check_name(name, value, names)


def expect(expected: str, accepts: Callable[[Any], bool]) -> Rule:
    """Return the rule of a field whose value is accepted."""

    def check(name: str, value: Any) -> None:
        if not accepts(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    return check


def _only(value: Any, why: str) -> Rule:
    return expect(f"{value!r} ({why})", lambda other: other == value)


def numbers(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is a list of numbers."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}: expected a list of numbers, got {value!r}")
    for item in value:
        check_number(name, item)


def repository(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` can be the name of a repository of the hub."""
    try:
        validate_repo_id(value)
    except HFValidationError as error:
        raise ValueError(f"{name}: expected owner/name or name, got {value!r}: {error}") from error


def check_url(name: str, value: Any) -> None:
    """Raise ValueError unless ``value`` is the URL of a web server."""
    try:
        parts = urlsplit(str(value))
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # of the port
        good = False
    if not good:
        raise ValueError(f"{name}: expected http://host:port, got {masked_url(str(value))!r}")


def options(name: str, value: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return the dictionary of an option that the command line takes as JSON; empty for None.

    Raises:
        ValueError: it is neither.
    """
    if value is None or isinstance(value, dict):
        return value or {}
    raise ValueError(
        f"{name}: expected a dictionary, as JSON {{...}}, got {masked_text(repr(value))}"
    )


AtLeastOne = Annotated[int, integer(1)]
Count = Annotated[int, integer(0)]
Port = Annotated[int, integer(1, 65535)]
NotNegative = Annotated[float, number(0)]
Positive = Annotated[float, number(0, above=True)]
Fraction = Annotated[float, number(0, 1)]
Share = Annotated[float, number(0, 1, above=True)]
Text = Annotated[str, expect("a text", lambda value: isinstance(value, str))]
Folder = Annotated[
    str, expect("a folder", lambda value: isinstance(value, str) and Path(value).is_dir())
]
Options = Annotated[dict[str, Any] | str | None, options]

_BOOLEANS = {bool: (True, False), bool | None: (True, False, None)}
# rules of fields of transformers' own
_INHERITED: dict[str, Rule] = {
    "num_train_epochs": number(0),
    "max_steps": expect(
        "at least 1, or -1 to go by num_train_epochs",
        lambda value: isinstance(value, int) and (value == -1 or value >= 1),
    ),
    "per_device_train_batch_size": integer(1),
    "per_device_eval_batch_size": integer(1),
    "gradient_accumulation_steps": integer(1),
    "auto_find_batch_size": _only(False, "a smaller batch would split groups"),
    "label_smoothing_factor": _only(0.0, "there are no labels"),
    "parallelism_config": _only(None, "each process has the whole model and whole sequences"),
    "train_sampling_strategy": _only("random", "prompts are sampled in groups"),
}
# where a field keeps its default: with another one that is set, or without one; and why
_RELATIONS = {
    "sync_ref_model without beta": "where there is no reference model",
    "log_completions_hub_repo without log_completions": "which writes what is uploaded",
    "backward_exact_weight without backward_tolerance": "where all gradients are exact",
    "backward_tolerance with entropy_coef": "whose gradient is exact alone",
    "backward_tolerance with use_adaptive_entropy": "whose gradient is exact alone",
    "backward_tolerance with use_sampling_mask": "whose gradient is exact alone",
    "cache_implementation with use_vllm": "which has a cache of its own",
    "cache_implementation with use_transformers_continuous_batching": "which has its own",
    "use_vllm with use_transformers_continuous_batching": "which is an engine, too",
    "use_vllm with rollout_engine": "which is an engine, too",
    "use_transformers_continuous_batching with rollout_engine": "which is an engine, too",
    "transformers_continuous_batching_config without use_transformers_continuous_batching": "whose "
    "settings they are",
    "use_sampling_mask with use_transformers_continuous_batching": "which does not report what its "
    "filters left",
    "overlap_generation without vllm_importance_sampling_correction": "which corrects for "
    "completions of older weights",
    "on_bad_image with overlap_generation": "which draws the rows of a checkpoint's completions "
    "once more and has to find the same ones",
    "dynamic_prompts_fn with overlap_generation": "which needs the next prompts before the current "
    "completions are scored",
    "dynamic_prompts_form without dynamic_prompts_fn": "whose form it is",
}


def check_fields(args: TrainingArguments) -> None:
    """Raise ValueError unless each field is as its annotation says, and fits to the others.

    One that is true or false has to be one of the two: any text would pass for true. The command
    line has read its words by now.
    """
    config: Any = type(args)
    for name, (kind, marks) in annotated_fields(config).items():
        value = getattr(args, name)
        if value not in (choices := _BOOLEANS.get(kind, (value,))):
            raise ValueError(f"{name}: expected {' or '.join(map(str, choices))}, got {value!r}")
        if value is None and type(None) in get_args(kind):
            continue
        if name in _INHERITED:
            _INHERITED[name](name, value)
        for rule in filter(callable, marks):
            rule(name, value)
    for relation, why in _RELATIONS.items():
        name, how, other = relation.split()
        value, default = getattr(args, name), default_of(args, name)
        if value != default and bool(getattr(args, other)) is (how == "with"):
            raise ValueError(
                f"{name}: expected {default!r} {how} {other}, {why}; got {masked_text(repr(value))}"
            )
    low, high = args.entropy_coef_min, args.entropy_coef_max
    number(low)("entropy_coef_max", high)
    if args.use_adaptive_entropy:
        number(low, high)("entropy_coef", args.entropy_coef)


@cache
def annotated_fields(config: type) -> dict[str, tuple[Any, list[Any]]]:
    """Return the type of each field, and what ``Annotated`` says of it or of a part of it."""
    kinds = get_type_hints(config)
    return {
        name: (kinds[name], _marks(annotation))
        for name, annotation in get_type_hints(config, include_extras=True).items()
    }


def _marks(annotation: Any) -> list[Any]:
    inner = [mark for part in get_args(annotation) for mark in _marks(part)]
    return [*getattr(annotation, "__metadata__", ()), *inner]


def default_of(args: TrainingArguments, name: str) -> Any:
    """Return what a field is by default."""
    return type(args).__dataclass_fields__[name].default


def parse_json_fields(args: TrainingArguments) -> None:
    """Turn the dictionaries that the command line gives as JSON into dictionaries.

    Raises:
        ValueError: one is not JSON, or accelerate has no such setting.
    """
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                setattr(args, name, json.loads(value))
            except (json.JSONDecodeError, RecursionError) as error:
                shown = masked_text(repr(value))
                raise ValueError(f"{name}: expected JSON, got {shown}: {error}") from error
    of_accelerate = args.accelerator_config
    for name in of_accelerate if isinstance(of_accelerate, dict) else ():
        check_name("accelerator_config", name, [item.name for item in fields(AcceleratorConfig)])


def check_inherited(args: TrainingArguments) -> None:
    """Raise ValueError if transformers has set what cannot work here; warn of one without effect.

    Liger is kept from patching the head, whose forward computes our loss.
    """
    for tracker in args.report_to:
        check_name("report_to", tracker, INTEGRATION_TO_CALLBACK)
    installed = get_available_reporting_integrations()
    if missing := sorted(set(args.report_to) - set(installed)):
        raise ValueError(
            f"report_to: expected trackers that are installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; pip install {' '.join(missing)}"
        )
    reasons = {
        "dispatch_batches": "the main process can send tensors alone, and prompts are none",
        "split_batches": "batch sizes are those of one process",
    }
    for name, reason in reasons.items():
        if getattr(args.accelerator_config, name):
            raise ValueError(f"accelerator_config: expected {name}=False ({reason}), got True")
    if args.dataloader_num_workers:
        warnings.warn(
            "dataloader_num_workers: no effect on training, whose prompts each process reads "
            "itself when it needs them; evaluation has these workers",
            stacklevel=4,
        )
    if args.use_liger_kernel:
        patches = dict.fromkeys(("fused_linear_cross_entropy", "cross_entropy"), False)
        args.liger_kernel_config = patches | (args.liger_kernel_config or {})
        for name in patches:
            if args.liger_kernel_config[name]:
                raise ValueError(
                    f"liger_kernel_config[{name!r}]: expected False, got True: the loss of this "
                    "trainer is fused already"
                )


def set_generation_batch(args: TrainingArguments) -> None:
    """Fill in whichever of generation_batch_size and steps_per_generation is missing."""
    step = args.per_device_train_batch_size * args.world_size
    size, steps = args.generation_batch_size, args.steps_per_generation
    if size is not None and steps is not None:
        raise ValueError(
            "generation_batch_size, steps_per_generation: expected at most one of them, "
            f"got {size} and {steps}"
        )
    if size is None:
        size = step * (steps or args.gradient_accumulation_steps)
    if size % step:
        raise ValueError(
            f"generation_batch_size: expected a multiple of {step}, the batch of one step over "
            f"all processes, got {size}"
        )
    if size % args.num_generations:
        valid = [n for n in range(2, size + 1) if size % n == 0]
        raise ValueError(
            f"num_generations: expected a divisor of the generation batch of {size} "
            f"completions ({', '.join(map(str, valid)) or 'none: enlarge the batch'}), "
            f"got {args.num_generations}"
        )
    args.generation_batch_size = size
    args.steps_per_generation = size // step


def set_padding(args: TrainingArguments) -> None:
    """Turn ``auto`` and the command line's words into the multiple, or None.

    Raises:
        ValueError: it is none of these.
    """
    value = args.pad_to_multiple_of
    words = {"auto": 128 if args.device.type == "neuron" else None}
    words |= dict.fromkeys(("none", "null", "None"))
    if isinstance(value, str):
        value = int(value) if value.isdecimal() else words.get(value, value)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(
            f"pad_to_multiple_of: expected an integer >= 1, auto or none, got {value!r}"
        )
    args.pad_to_multiple_of = value


def _old(advice: str, **metadata: Any) -> Any:
    return setting(None, f"Deprecated: {advice}", **metadata)


@dataclass
class OldNames:
    """Deprecated fields; None means not set, and each is None after construction."""

    wandb_log_unique_prompts: bool | None = _old("use log_unique_prompts.", **FLAG)
    use_liger_loss: bool | None = _old("the loss is always fused, drop it.", **FLAG)
    use_transformers_paged: bool | None = _old("use use_transformers_continuous_batching.", **FLAG)
    vllm_guided_decoding_regex: str | None = _old("use vllm_structured_outputs_regex.")
    vllm_importance_sampling_cap: float | None = _old("use vllm_importance_sampling_clip_max.")


_NEW_NAMES = {
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_transformers_paged": "use_transformers_continuous_batching",
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
    "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
}


def adopt_old_names(args: TrainingArguments) -> None:
    """Move deprecated values to the fields that took their place.

    Raises:
        ValueError: an old and its new name are both set, to different values.
    """
    for item in fields(OldNames):
        value, new = getattr(args, item.name), _NEW_NAMES.get(item.name)
        if value is None:
            continue
        _warn_of_old(f"{item.name}: {item.metadata['help']}")
        setattr(args, item.name, None)
        if new is None:
            continue
        if getattr(args, new) not in (default_of(args, new), value):
            raise ValueError(
                f"{item.name}, {new}: expected one of them (they are the same), "
                f"got {value!r} and {getattr(args, new)!r}"
            )
        setattr(args, new, value)
    if args.top_k is None:
        _warn_of_old("top_k: Deprecated: use 0 for None.")
        args.top_k = 0
    init = args.model_init_kwargs
    if isinstance(init, dict) and "torch_dtype" in init:  # from_pretrained ignores it beside dtype
        _warn_of_old("model_init_kwargs['torch_dtype']: Deprecated: use dtype.")
        old, init = init["torch_dtype"], {k: v for k, v in init.items() if k != "torch_dtype"}
        if _dtype_name(init.setdefault("dtype", old)) != _dtype_name(old):
            raise ValueError(
                "model_init_kwargs: expected one of dtype and torch_dtype (they are the same), got "
                f"{init['dtype']!r} and {old!r}"
            )
        args.model_init_kwargs = init


def _warn_of_old(message: str) -> None:
    warnings.warn(message, FutureWarning, stacklevel=5)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def check_model_dtype(name: str, value: Any) -> None:
    """Raise ValueError unless from_pretrained takes the dtype among its arguments."""
    dtype = options(name, value).get("dtype", "auto")
    if dtype is None or dtype == "auto" or isinstance(dtype, dict):  # one for each part
        return
    known = getattr(torch, _dtype_name(dtype), None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(
            f"{name}['dtype']: expected auto or a floating-point dtype of torch such as bfloat16, "
            f"got {dtype!r}"
        )
