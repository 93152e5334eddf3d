"""What GRPOConfig checks on construction: ranges, names, and combinations that cannot work."""

from __future__ import annotations

import inspect
import json
import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import field, fields
from typing import Any, Self, get_type_hints

import torch
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import GenerationConfig, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_trainer.common import hint, masked_text

# for a field that is true or false and None by default: a flag without a value is true
FLAG = {"nargs": "?", "const": True}


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field; ``metadata`` is for its argument on the command line."""
    return field(default=default, metadata={"help": text, **metadata})


class NamedFields:
    """Says which field was meant, as the command line does, where the constructor knows none.

    Raises:
        TypeError: there is no such argument.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        taken = inspect.signature(cls.__init__).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in taken.values())
        for name in values:
            if name not in taken and not takes_all:
                raise TypeError(
                    f"{cls.__name__}.__init__() got an unexpected keyword argument {name!r}"
                    f"{hint(name, taken)}"
                )
        return super().__new__(cls)


def check_inherited(args: TrainingArguments) -> None:
    """Raise ValueError if one is set that cannot work here, and warn of one without effect."""
    _check_trackers(args)
    _check_loading(args)
    _check_what_trainer_would_ignore(args)


def check_accelerator(args: TrainingArguments) -> None:
    """Raise ValueError if accelerate has no such setting."""
    given = args.accelerator_config
    known = [item.name for item in fields(AcceleratorConfig)]
    for name in given if isinstance(given, dict) else ():
        check_choice("accelerator_config", name, known)


def leave_the_head_to_us(args: TrainingArguments) -> None:
    """Keep Liger from patching the head, whose forward computes our loss."""
    if not args.use_liger_kernel:
        return
    patches: dict[str, Any] = dict(args.liger_kernel_config or {})
    for name in ("fused_linear_cross_entropy", "cross_entropy"):
        if patches.setdefault(name, False):
            raise ValueError(
                f"liger_kernel_config[{name!r}]: expected False, got True: the loss of this "
                "trainer is fused already"
            )
    args.liger_kernel_config = patches


def _check_loading(args: TrainingArguments) -> None:
    """Check settings of loaders, which do not read the training prompts: each process does."""
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
            stacklevel=5,
        )


def _check_what_trainer_would_ignore(args: TrainingArguments) -> None:
    """Check arguments of transformers' Trainer that have no meaning here."""
    reasons = {
        "auto_find_batch_size": (False, "a smaller batch would split groups"),
        "label_smoothing_factor": (0.0, "there are no labels"),
        "parallelism_config": (None, "each process has the whole model and whole sequences"),
        "train_sampling_strategy": ("random", "prompts are sampled in groups"),
    }
    for name, (expected, reason) in reasons.items():
        value = getattr(args, name, expected)
        if value != expected:
            raise ValueError(f"{name}: expected {expected!r} ({reason}), got {value!r}")


def _check_trackers(args: TrainingArguments) -> None:
    trackers = [args.report_to] if isinstance(args.report_to, str) else args.report_to or []
    for tracker in trackers:
        check_choice("report_to", tracker, INTEGRATION_TO_CALLBACK)
    installed = get_available_reporting_integrations()
    missing = sorted(set(trackers) - set(installed))
    if missing:
        raise ValueError(
            f"report_to: expected trackers that are installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; pip install {' '.join(missing)}"
        )


# the advantages have a function for each of them
SCALES = ("group", "batch", "none")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")

# fields that are integers of at least so much, or None where that is the default
_AT_LEAST = {
    "num_generations": 2,
    "num_generations_eval": 1,
    "num_iterations": 1,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_prompt_length": 1,
    "max_completion_length": 1,
    "steps_per_generation": 1,
    "generation_batch_size": 1,
    "num_completions_to_print": 0,
    "max_resampling_rounds": 1,
    "ref_model_sync_steps": 1,
    "max_tool_calling_iterations": 0,
    "top_k": 0,
    "activation_bytes": 0,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_length": 1,
    "vllm_server_port": 1,
    "vllm_group_port": 1,
}

# what generation shares with the loss is set once, in the field named here
_SHARED_WITH_THE_LOSS = {
    "temperature": "temperature",
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "num_return_sequences": "num_generations",
}


def check_booleans(args: TrainingArguments) -> None:
    """Raise ValueError unless every field that is true or false is one of the two.

    Any text would pass for true. The command line has read its words by now.
    """
    for name, annotation in get_type_hints(type(args)).items():
        value = getattr(args, name)
        known = {bool: (True, False), bool | None: (True, False, None)}.get(annotation)
        if known is not None and value not in known:
            raise ValueError(f"{name}: expected {' or '.join(map(str, known))}, got {value!r}")


def check_config(args: TrainingArguments) -> None:
    """Raise ValueError unless every field is in range and all of them fit together."""
    _check_integers(args)
    check_number("learning_rate", args.learning_rate, 0)
    check_number("num_train_epochs", args.num_train_epochs, 0)
    check_choice("scale_rewards", args.scale_rewards, SCALES)
    check_choice("multi_objective_aggregation", args.multi_objective_aggregation, AGGREGATIONS)
    _check_reference(args)
    _check_entropy(args)
    _check_rewards(args)
    _check_logs(args)
    _check_model(args)
    _check_generation(args)


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


def parse_json_fields(args: TrainingArguments) -> None:
    """Turn the dictionaries that the command line gives as JSON into dictionaries.

    Raises:
        ValueError: one is not JSON.
    """
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                setattr(args, name, json.loads(value))
            except (json.JSONDecodeError, RecursionError) as error:
                shown = masked_text(repr(value))
                raise ValueError(f"{name}: expected JSON, got {shown}: {error}") from error


def set_generation_batch(args: TrainingArguments) -> None:
    """Fill in whichever of generation_batch_size and steps_per_generation is missing."""
    step = args.per_device_train_batch_size * args.world_size
    size, steps = args.generation_batch_size, args.steps_per_generation
    if size is not None and steps is not None:
        raise ValueError(
            "generation_batch_size, steps_per_generation: expected at most one of them, "
            f"got {size} and {steps}"
        )
    if size is not None and size % step:
        raise ValueError(
            f"generation_batch_size: expected a multiple of {step}, the batch of one step over "
            f"all processes, got {size}"
        )
    if size is None:
        size = step * (steps or args.gradient_accumulation_steps)
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
    if value == "auto":
        args.pad_to_multiple_of = 128 if args.device.type == "neuron" else None
        return
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    value = None if value in ("none", "null", "None") else value
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(
            f"pad_to_multiple_of: expected an integer >= 1, auto or none, got {value!r}"
        )
    args.pad_to_multiple_of = value


def check_choice(name: str, value: Any, known: Iterable[str]) -> None:
    """Raise ValueError unless ``value`` is one of ``known``."""
    if value not in tuple(known):  # which any value can be asked for, unlike a dictionary
        raise ValueError(f"{name}: expected one of {', '.join(known)}; got {value!r}")


def check_number(
    name: str, value: Any, low: float, high: float = math.inf, above: bool = False
) -> None:
    """Raise ValueError unless ``value`` is a finite number in [low, high].

    With ``above`` the range is (low, high].
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    finite = number and abs(value) <= sys.float_info.max  # an int may be larger
    if finite and low <= value <= high and not (above and value == low):
        return
    expected = f"a number {'>' if above else '>='} {low:g}"
    expected += f" and <= {high:g}" if math.isfinite(high) else ""
    raise ValueError(f"{name}: expected {expected}, got {value!r}")


def _check_integers(args: TrainingArguments) -> None:
    if args.max_steps != -1 and args.max_steps < 1:
        raise ValueError(
            "max_steps: expected at least 1, or -1 to go by num_train_epochs, got "
            f"{args.max_steps!r}"
        )
    for name, least in _AT_LEAST.items():
        value, default = getattr(args, name), type(args).__dataclass_fields__[name].default
        if value is None and default is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")


def _check_reference(args: TrainingArguments) -> None:
    check_number("ref_model_mixup_alpha", args.ref_model_mixup_alpha, 0, 1)
    if args.sync_ref_model and args.beta == 0:
        raise ValueError(
            "sync_ref_model: expected False with beta=0, which uses no reference model, got True"
        )


def _check_entropy(args: TrainingArguments) -> None:
    if args.router_aux_loss_coef is not None:
        check_number("router_aux_loss_coef", args.router_aux_loss_coef, 0)
    for name in ("entropy_coef_min", "entropy_coef_delta", "entropy_target"):
        check_number(name, getattr(args, name), 0)
    check_number("entropy_coef_max", args.entropy_coef_max, args.entropy_coef_min)
    if args.use_adaptive_entropy:
        low, high = args.entropy_coef_min, args.entropy_coef_max
        check_number("entropy_coef", args.entropy_coef, low, high)


def _check_rewards(args: TrainingArguments) -> None:
    weights = args.reward_weights
    if weights is not None and not isinstance(weights, list | tuple):
        raise ValueError(f"reward_weights: expected a list of numbers, got {weights!r}")
    for weight in weights or ():
        check_number("reward_weights", weight, -math.inf)


def _check_logs(args: TrainingArguments) -> None:
    repository = args.log_completions_hub_repo
    if repository is None:
        return
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ValueError(
            f"log_completions_hub_repo: expected owner/name or name, got {repository!r}: {error}"
        ) from error
    if not args.log_completions:
        raise ValueError(
            "log_completions_hub_repo: expected log_completions with it, which writes what is "
            f"uploaded; got {repository!r} alone"
        )


def dtype_name(dtype: Any) -> str:
    """Return ``bfloat16`` for that text and for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _check_model(args: TrainingArguments) -> None:
    dtype = options("model_init_kwargs", args.model_init_kwargs).get("dtype", "auto")
    if dtype is None or dtype == "auto" or isinstance(dtype, dict):  # one for each part
        return
    known = getattr(torch, dtype_name(dtype), None)
    if not isinstance(known, torch.dtype) or not known.is_floating_point:
        raise ValueError(
            "model_init_kwargs['dtype']: expected auto or a floating-point dtype of torch such as "
            f"bfloat16, got {dtype!r}"
        )


def _check_generation(args: TrainingArguments) -> None:
    check_number("top_p", args.top_p, 0, 1, above=True)
    check_number("repetition_penalty", args.repetition_penalty, 0, above=True)
    if args.min_p is not None:
        check_number("min_p", args.min_p, 0, 1)
    options("chat_template_kwargs", args.chat_template_kwargs)
    own_names = args.use_vllm or args.rollout_engine is not None  # checked by that engine
    known = GenerationConfig(cache_implementation=args.cache_implementation)  # checks it
    for name in options("generation_kwargs", args.generation_kwargs):
        if name in _SHARED_WITH_THE_LOSS:
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected the field {_SHARED_WITH_THE_LOSS[name]} "
                "instead, which the loss reads too"
            )
        if not own_names and name in ("stop", "stop_strings"):
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected no text where transformers generates; "
                "token ids that end a completion are its 'stop_token_ids'"
            )
        if not own_names and name != "stop_token_ids" and not hasattr(known, name):
            raise ValueError(f"generation_kwargs: GenerationConfig has no {name!r}")
