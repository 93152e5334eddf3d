"""Checks of GRPOConfig: each field by the rules in its annotation, then combinations."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import fields
from typing import Any, get_args

from transformers import GenerationConfig, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.trainer_pt_utils import AcceleratorConfig

from grpo_kernels import LossConfig
from grpo_kernels.common import check_name, check_number
from grpo_kernels.losses import CORRECTION_MODES
from grpo_trainer.config.fields import (
    EITHER,
    Rule,
    annotated_fields,
    dtype_name,
    expect,
    number,
    options,
)
from grpo_trainer.masking import cut_at_secret

# deprecated fields, and their replacements
OLD_NAMES = {
    "wandb_log_unique_prompts": "log_unique_prompts",
    "use_liger_loss": None,
    "vllm_guided_decoding_regex": "vllm_structured_outputs_regex",
}
# fields that transformers has renamed; both names get the value of the one that is set
NEWER_NAMES = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
_BOOLEANS = {bool: (True, False), bool | None: (True, False, None)}


def _only(value: Any, why: str) -> Rule:
    return expect(f"{value!r} ({why})", lambda other: other == value)


# rules for transformers' fields
_INHERITED: dict[str, Rule] = {
    "num_train_epochs": number(0),
    "max_steps": expect(
        "at least 1, or -1 to use num_train_epochs",
        lambda value: isinstance(value, int) and (value == -1 or value >= 1),
    ),
    "per_device_train_batch_size": number(1, whole=True),
    "per_device_eval_batch_size": number(1, whole=True),
    "gradient_accumulation_steps": number(1, whole=True),
    "auto_find_batch_size": _only(False, "a smaller batch would split groups"),
    "label_smoothing_factor": _only(0.0, "there are no labels"),
    "parallelism_config": _only(None, "each process has the whole model and whole sequences"),
    "train_sampling_strategy": _only("random", "prompts are sampled in groups"),
}
# a field that must keep its default with or without another field (or a value of it): the reason
_RELATIONS = {
    ("cache_implementation", "with", "use_vllm"): "which has its own cache",
    ("use_vllm", "with", "rollout_engine"): "which is an engine itself",
    ("on_bad_image", "with", "generation_batches_ahead"): (
        "which draws the rows of a checkpoint's completions again and must get the same ones"
    ),
    ("dynamic_prompts_fn", "with", "generation_batches_ahead"): (
        "which needs the next prompts before the current completions are scored"
    ),
    ("top_entropy_quantile", "with", "max_tokens_per_micro_batch"): (
        "whose micro-batches have rows of similar length, while the quantile is per micro-batch"
    ),
    ("sync_ref_model", "without", "beta"): "since there is no reference model",
    ("backward_tolerance", "without", "backward=sparse"): "since all gradients are exact",
    ("backward_exact_weight", "without", "backward=sparse"): "since all gradients are exact",
    ("max_staleness", "without", "generation_batches_ahead"): (
        "without which nothing is generated while weights are updated"
    ),
    ("generation_batches_ahead", "without", "vllm_importance_sampling_correction"): (
        "which corrects for completions from older weights"
    ),
}
# settings that generation shares with the loss are set once, in the field named here
_SHARED_WITH_THE_LOSS = {
    "temperature": "temperature",
    **dict.fromkeys(("max_new_tokens", "max_length", "max_tokens"), "max_completion_length"),
    **dict.fromkeys(("n", "num_return_sequences"), "num_generations"),
}


def check_fields(args: TrainingArguments) -> None:
    """Raise ValueError unless each field matches its annotation and fits the others.

    A boolean field must be True or False: any text would count as true. The command line's words
    have been parsed by now.
    """
    for name, (kind, marks) in annotated_fields(args.__class__).items():
        value = getattr(args, name)
        if value not in (choices := _BOOLEANS.get(kind, (value,))):
            raise ValueError(f"{name}: expected {' or '.join(map(str, choices))}, got {value!r}")
        if value is None and type(None) in get_args(kind):
            continue
        for rule in filter(callable, (_INHERITED.get(name), *marks)):
            rule(name, value)
    for (name, word, condition), reason in _RELATIONS.items():
        other, _, expected = condition.partition("=")
        holds = getattr(args, other) == expected if expected else bool(getattr(args, other))
        value, default = getattr(args, name), _default(args, name)
        if holds == (word == "with") and value != default:
            got = cut_at_secret(repr(value))
            raise ValueError(
                f"{name}: expected {default!r} {word} {condition}, {reason}; got {got}"
            )
    low, high = args.entropy_coef_min, args.entropy_coef_max
    number(low)("entropy_coef_max", high)
    if args.use_adaptive_entropy:
        number(low, high)("entropy_coef", args.entropy_coef)


def _default(args: TrainingArguments, name: str) -> Any:
    return type(args).__dataclass_fields__[name].default


def parse_json_fields(args: TrainingArguments) -> None:
    """Parse the dictionaries that the command line gives as JSON.

    Raises:
        ValueError: one is not JSON, or accelerate has no such setting.
    """
    for name in args._VALID_DICT_FIELDS:
        value = getattr(args, name)
        if isinstance(value, str) and value.startswith("{"):
            try:
                setattr(args, name, json.loads(value))
            except (json.JSONDecodeError, RecursionError) as error:
                shown = cut_at_secret(repr(value))
                raise ValueError(f"{name}: expected JSON, got {shown}: {error}") from error
    of_accelerate = args.accelerator_config
    for name in of_accelerate if isinstance(of_accelerate, dict) else ():
        check_name("accelerator_config", name, [item.name for item in fields(AcceleratorConfig)])


def join_newer_names(args: TrainingArguments) -> None:
    """Give both names of a setting the same value.

    Raises:
        ValueError: they have different values.
    """
    for name, newer in NEWER_NAMES.items():
        older_value, newer_value = getattr(args, name), getattr(args, newer)
        if None not in (older_value, newer_value) and older_value != newer_value:
            raise ValueError(
                f"{name}, {newer}: expected one of them (they are the same setting), "
                f"got {older_value!r} and {newer_value!r}"
            )
        value = older_value if newer_value is None else newer_value
        if value is None and name == "gradient_checkpointing":
            value = True
        setattr(args, name, value)
        setattr(args, newer, value)


def adopt_old_names(args: TrainingArguments) -> None:
    """Move the values of deprecated fields to their replacements.

    Raises:
        ValueError: the old and the new name are both set, to different values.
    """

    def deprecated(what: str, advice: str) -> None:
        warnings.warn(f"{what}: Deprecated: {advice}.", FutureWarning, stacklevel=5)

    for name, new in OLD_NAMES.items():
        value = getattr(args, name)
        if value is None:
            continue
        deprecated(name, f"use {new}" if new else "the loss is always fused, remove it")
        setattr(args, name, None)
        if new is None:
            continue
        if getattr(args, new) not in (_default(args, new), value):
            raise ValueError(
                f"{name}, {new}: expected one of them (they are the same setting), "
                f"got {value!r} and {getattr(args, new)!r}"
            )
        setattr(args, new, value)
    if args.top_k is None:
        deprecated("top_k", "use 0 for None")
        args.top_k = 0
    init = args.model_init_kwargs
    if isinstance(init, dict) and "torch_dtype" in init:  # from_pretrained prefers dtype
        deprecated("model_init_kwargs['torch_dtype']", "use dtype")
        init = dict(init)
        old = init.pop("torch_dtype")
        if dtype_name(init.setdefault("dtype", old)) != dtype_name(old):
            raise ValueError(
                "model_init_kwargs: expected one of dtype and torch_dtype (they are the same "
                f"setting), got {init['dtype']!r} and {old!r}"
            )
        args.model_init_kwargs = init


def check_inherited(args: TrainingArguments) -> None:
    """Raise ValueError for settings of transformers that cannot work here; warn of unused ones.

    Liger must not patch the head, whose forward computes our loss, or tiled MLPs.
    """
    for tracker in args.report_to:
        check_name("report_to", tracker, INTEGRATION_TO_CALLBACK)
    installed = get_available_reporting_integrations()
    if missing := sorted(set(args.report_to) - set(installed)):
        raise ValueError(
            f"report_to: expected trackers that are installed ({', '.join(installed) or 'none'}), "
            f"got {', '.join(missing)}; pip install {' '.join(missing)}"
        )
    for name, reason in {
        "dispatch_batches": "the main process can send only tensors, and prompts are not tensors",
        "split_batches": "batch sizes are per process",
    }.items():
        if getattr(args.accelerator_config, name):
            raise ValueError(f"accelerator_config: expected {name}=False ({reason}), got True")
    if args.dataloader_num_workers:
        warnings.warn(
            "dataloader_num_workers: no effect on training, where each process reads prompts when "
            "it needs them; evaluation uses these workers",
            stacklevel=4,
        )
    if args.use_liger_kernel:
        reasons = dict.fromkeys(
            ("fused_linear_cross_entropy", "cross_entropy"),
            "this trainer's loss is already fused",
        )
        if args.mlp_tile_tokens is not None:
            reasons |= dict.fromkeys(
                ("swiglu", "geglu"), "mlp_tile_tokens sets the forward of MLPs itself"
            )
        args.liger_kernel_config = dict.fromkeys(reasons, False) | (args.liger_kernel_config or {})
        for name, reason in reasons.items():
            if args.liger_kernel_config[name]:
                raise ValueError(
                    f"liger_kernel_config[{name!r}]: expected False, got True: {reason}"
                )


def set_generation_batch(args: TrainingArguments) -> None:
    """Fill in generation_batch_size or steps_per_generation, whichever is missing."""
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
            f"generation_batch_size: expected a multiple of {step}, the batch of one micro-step "
            f"over all processes, got {size}"
        )
    if size % args.num_generations:
        valid = [n for n in range(2, size + 1) if size % n == 0]
        raise ValueError(
            f"num_generations: expected a divisor of the generation batch of {size} "
            f"completions ({', '.join(map(str, valid)) or 'none: increase the batch size'}), "
            f"got {args.num_generations}"
        )
    args.generation_batch_size = size
    args.steps_per_generation = size // step


def set_padding(args: TrainingArguments) -> None:
    """Turn ``auto`` and the command line's words into a multiple, or None.

    Raises:
        ValueError: it is none of these.
    """
    name, value = "pad_to_multiple_of", args.pad_to_multiple_of
    words = {"auto": 128 if args.device.type == "neuron" else None}
    words |= dict.fromkeys(("none", "null", "None"))
    if isinstance(value, str):
        value = int(value) if value.isdecimal() else words.get(value, value)
    if value is not None:
        whole = isinstance(value, int)
        check_number(name, value, "an integer >= 1, auto or none", lambda n: whole and n >= 1)
    args.pad_to_multiple_of = value


def check_token_budget(args: TrainingArguments) -> None:
    """Raise ValueError unless a micro-batch can hold the longest completion with its prompt."""
    longest = _longest(args)
    longest += -longest % (args.pad_to_multiple_of or 1)
    _check_room("max_tokens_per_micro_batch", args, longest)


def _check_length_of_vllm(args: TrainingArguments) -> None:
    if args.use_vllm and args.vllm_mode == "colocate":
        _check_room("vllm_max_model_length", args, _longest(args))


def _longest(args: TrainingArguments) -> int:
    """Return the tokens of the longest completion plus its prompt, as far as they are known."""
    return (args.max_prompt_length or 1) + args.max_completion_length


def _check_room(name: str, args: TrainingArguments, longest: int) -> None:
    tokens, prompt = getattr(args, name), args.max_prompt_length
    if tokens is not None and tokens < longest:
        raise ValueError(
            f"{name}: expected at least {longest}, for a completion of max_completion_length = "
            f"{args.max_completion_length} tokens and a prompt of "
            f"{f'max_prompt_length = {prompt}' if prompt else 'one'}, got {tokens}"
        )


def check_engine(args: TrainingArguments, loss: LossConfig) -> None:
    """Raise ValueError unless the engine's settings fit together, and fit ``loss``."""
    _check_unused(args)
    _check_generation(args)
    _check_length_of_vllm(args)
    if args.use_sampling_mask:
        top_k = options("generation_kwargs", args.generation_kwargs).get("top_k", args.top_k)
        if top_k < 1:
            raise ValueError(
                "use_sampling_mask: expected top_k >= 1 with it, to limit how many ids each token "
                f"has, got {top_k}"
            )
    if args.use_rollout_routing_replay:
        own = options("vllm_engine_kwargs", args.vllm_engine_kwargs)
        if not own.get("enable_return_routed_experts", True):
            raise ValueError(
                "vllm_engine_kwargs['enable_return_routed_experts']: expected none with "
                "use_rollout_routing_replay, which sets it to True, got False"
            )
    if args.use_vllm:
        _check_correction(args, loss)
    if args.generation_batches_ahead:
        _check_ahead(args)


def _check_ahead(args: TrainingArguments) -> None:
    """Raise ValueError unless completions can be sampled ahead with the other settings."""
    if "seed" in options("generation_kwargs", args.generation_kwargs):
        raise ValueError(
            "generation_kwargs['seed']: expected none with generation_batches_ahead, which "
            "requests one completion at a time: all completions of a prompt would be the same"
        )
    if args.use_vllm and args.vllm_mode == "colocate":
        raise ValueError(
            "generation_batches_ahead: expected 0 with vllm_mode='colocate', since vLLM then runs "
            "in the training process (vllm_mode='server' can generate during training), got "
            f"{args.generation_batches_ahead}"
        )
    if args.max_staleness is None:
        return
    micro_steps = args.generation_batches_ahead * args.micro_steps_per_generation
    least = math.ceil(micro_steps / args.gradient_accumulation_steps)
    if args.max_staleness < least:
        raise ValueError(
            f"max_staleness: expected at least {least}, the age in optimizer steps of all "
            f"completions with generation_batches_ahead = {args.generation_batches_ahead}, got "
            f"{args.max_staleness}"
        )
    if args.prompts_per_generation % args.world_size:
        raise ValueError(
            "max_staleness: expected None, or a generation batch whose prompts divide evenly among "
            f"{args.world_size} processes, got {args.prompts_per_generation} prompts"
        )


def _check_unused(args: TrainingArguments) -> None:
    """Raise ValueError for vLLM settings of the other mode; warn of other unused ones."""
    unused = []
    for name, (_, marks) in annotated_fields(args.__class__).items():
        for mode in (mark for mark in marks if isinstance(mark, str)):
            if getattr(args, name) == _default(args, name):
                continue
            if not args.use_vllm:
                unused.append(name)
            elif mode not in (EITHER, args.vllm_mode):
                raise ValueError(f"{name}: expected only with vllm_mode={mode!r}")
    if unused and args.rollout_engine is None:
        warnings.warn(f"{', '.join(unused)}: no effect without use_vllm", stacklevel=5)


def _check_generation(args: TrainingArguments) -> None:
    own_names = args.use_vllm or args.rollout_engine is not None  # that engine checks them
    known = GenerationConfig(cache_implementation=args.cache_implementation)  # checks it
    for name in options("generation_kwargs", args.generation_kwargs):
        if name in _SHARED_WITH_THE_LOSS:
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected the field {_SHARED_WITH_THE_LOSS[name]} "
                "instead, which the loss also reads"
            )
        if not own_names and name in ("stop", "stop_strings"):
            raise ValueError(
                f"generation_kwargs[{name!r}]: expected none with the transformers engine; pass "
                "the ids of tokens that end a completion as 'stop_token_ids'"
            )
        if not own_names and name != "stop_token_ids" and not hasattr(known, name):
            raise ValueError(f"generation_kwargs: GenerationConfig has no {name!r}")


def _check_correction(args: TrainingArguments, loss: LossConfig) -> None:
    """Check the correction for the log-probabilities that the engine reports."""
    mode = loss.correction_mode
    if mode is None:
        return
    filters = {"top_p": args.top_p < 1, "top_k": args.top_k > 0, "min_p": bool(args.min_p)}
    if any(filters.values()) and not args.use_sampling_mask:
        used = ", ".join(name for name, on in filters.items() if on)
        warnings.warn(
            f"{used}: the engine reports log-probabilities after this filter, while the policy's "
            "are over the whole vocabulary; vllm_importance_sampling_correction also corrects for "
            "this, and use_sampling_mask removes the difference",
            stacklevel=5,
        )
    if loss.surrogate.uses_rollout_weight and mode.per_sequence:
        per_token = [name for name, mode in CORRECTION_MODES.items() if not mode.per_sequence]
        raise ValueError(
            f"vllm_importance_sampling_mode: expected one of {', '.join(per_token)} with "
            f"{loss.loss_type}, which weights tokens itself; got "
            f"{args.vllm_importance_sampling_mode!r}"
        )
