"""The loss as GRPOConfig describes it: the fields of LossConfig and of its surrogates."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import defaultdict
from dataclasses import make_dataclass
from inspect import cleandoc
from typing import Any, get_type_hints

from transformers import TrainingArguments

from grpo_kernels import Bounded, LossConfig
from grpo_kernels.losses import LOSSES
from grpo_trainer.common import setting
from grpo_trainer.config.fields import options

# fields of LossConfig for every loss; GRPOConfig has other names for the correction's fields
_GENERAL = {
    item.name
    for item in dataclasses.fields(LossConfig)
    if item.init and item.name != "surrogate" and not item.name.startswith("rollout_correction_")
}
# settings of single losses that TRL's GRPOConfig has for all losses, and that its scripts set
OF_TRL = (
    *("epsilon", "epsilon_high", "delta"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
    *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
)


def _mirrored() -> list[tuple[str, Any, Any]]:
    """Return names, types and fields that mirror LossConfig and the surrogates.

    Descriptions come from the docstrings of the losses that have the field.
    """
    mirrored: dict[str, tuple[Any, Any]] = {}  # type and default
    # the losses of each description, by field
    losses: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    owners: dict[str, Any] = {"": LossConfig}
    owners |= {name: loss.surrogate for name, loss in LOSSES.items()}
    for loss, owner in owners.items():
        hints, texts = get_type_hints(owner), _descriptions(owner)
        for item in dataclasses.fields(owner):
            if owner is not LossConfig or item.name in _GENERAL:
                mirrored.setdefault(item.name, (hints[item.name], item.default))
                losses[item.name][texts.get(item.name, "")].append(loss)
    return [
        (name, kind, setting(default, _joined(losses[name])))
        for name, (kind, default) in mirrored.items()
    ]


def _descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of a class's arguments from its docstring and its bases'."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", cleandoc(base.__doc__ or ""), re.M)
        texts |= {name: " ".join(text.split()) for name, text in entries}
    return texts


def _joined(losses: dict[str, list[str]]) -> str:
    """Return the descriptions, each with the losses it is about; a general one names none."""
    parts = [f"{', '.join(names)}: {text}".removeprefix(": ") for text, names in losses.items()]
    return " ".join(parts).replace("``", "`").replace("%", "%%")


LossFields: Any = make_dataclass(
    "LossFields",
    _mirrored(),
    namespace={"__doc__": "The loss, as in LossConfig.", "__module__": __name__},
)


def loss_config(args: TrainingArguments) -> LossConfig:
    """Return the loss that ``args`` describes.

    Raises:
        ValueError: a value is out of range, or the loss does not have a setting.
    """
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    if high is not None and low is not None and low >= high:
        raise ValueError(
            "vllm_importance_sampling_clip_min: expected a number below "
            f"vllm_importance_sampling_clip_max = {high!r}, got {low!r}"
        )
    corrected = args.vllm_importance_sampling_correction
    settings = {
        "rollout_correction_mode": args.vllm_importance_sampling_mode if corrected else None,
        "rollout_correction_max": high,
        "rollout_correction_min": low,
    }
    loss = LOSSES.get(str(args.loss_type))  # LossConfig raises for an unknown one
    named = _GENERAL.union(loss.settings if loss else ())
    changed, unused = _changed(args), unused_settings(args)
    for item in dataclasses.fields(LossFields):
        if item.name in named | changed and item.name not in unused:
            settings[item.name] = getattr(args, item.name)
    for name, value in options("loss_kwargs", args.loss_kwargs).items():
        if name in LossConfig.__dataclass_fields__:
            raise ValueError(
                f"loss_kwargs: expected the loss's own settings, got {name!r}, a setting of all "
                "losses; set it as its own option"
            )
        if name in changed:
            raise ValueError(
                f"loss_kwargs: expected no {name!r}, since the option is set too, got both"
            )
        settings[name] = value
    config = LossConfig(**settings)
    if config.exclude_zero_variance and config.aggregation.counts_tokens:
        raise ValueError(
            f"exclude_zero_variance: expected False with {config.aggregation_name!r}, since "
            "the trainer counts the tokens of all sequences"
        )
    return config


def _changed(args: TrainingArguments) -> set[str]:
    items = dataclasses.fields(LossFields)
    return {item.name for item in items if getattr(args, item.name) != item.default}


def unused_settings(args: TrainingArguments) -> list[str]:
    """Return the settings of other losses that are set, as TRL's scripts set them for every
    loss."""
    loss, changed = LOSSES.get(str(args.loss_type)), _changed(args)
    own = OF_TRL if loss is None else loss.settings
    return [name for name in OF_TRL if name in changed and name not in own]


def check_unused(args: TrainingArguments) -> None:
    """Warn of settings that the loss does not use.

    Raises:
        ValueError: a value is invalid even for the losses that have the setting.
    """
    unused = unused_settings(args)
    for name in unused:
        owner = next(loss for loss in LOSSES.values() if name in loss.settings)
        owner.surrogate(**{name: getattr(args, name)})  # checks the value
    if unused:
        warnings.warn(f"{', '.join(unused)}: not used by {args.loss_type}", stacklevel=4)


def check_level(args: TrainingArguments, loss: LossConfig) -> None:
    """Warn of a ratio level that the loss was not designed for."""
    level, own = args.importance_sampling_level, loss.loss.ratio_level
    if level is None or loss.ratio_level is own:
        return
    if loss.ratio_level.per_sequence and not loss.aggregation.by_sequence:
        warnings.warn(
            f"importance_sampling_level: with {level!r}, {loss.loss_type} sums over tokens, so "
            "longer sequences count more; gspo weights all sequences equally, as in its paper",
            stacklevel=4,
        )
    if own.per_sequence and not loss.ratio_level.per_sequence:
        warnings.warn(
            f"importance_sampling_level: {loss.loss_type} is defined with "
            f"{loss.loss.importance_sampling_level!r}, got {level!r}",
            stacklevel=4,
        )


def check_backward(args: TrainingArguments, loss: LossConfig) -> None:
    """Raise ValueError for a sparse backward if only an exact one is possible, and for one pass
    if a loss needs two."""
    backward_options(args)  # checks the seed
    scope = loss.scope(args.use_vllm or args.rollout_engine is not None)
    if args.schedule == "one_pass" and scope != "token":
        raise ValueError(
            f"schedule: expected auto or two_pass, since with {loss.loss_type} and these settings "
            f"a token's loss depends on its {scope}; got {args.schedule!r}"
        )
    if args.backward == "exact" or loss.entropy_coef == 0:
        return
    for name, is_set in (
        ("top_entropy_quantile", args.top_entropy_quantile < 1),
        ("use_sampling_mask", args.use_sampling_mask),
        ("schedule", args.schedule == "two_pass"),
    ):
        if is_set:
            raise ValueError(
                f"backward: expected 'exact' for an entropy bonus with {name}={getattr(args, name)}"
                f", got {args.backward!r}"
            )


def backward_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of ``linear_policy_loss`` that ``args`` describes."""
    arguments: dict[str, Any] = {
        "schedule": args.schedule,
        "activation_bytes": args.activation_bytes,
    }
    if args.backward == "sparse":
        arguments["backward"] = Bounded(
            tolerance=float(args.backward_tolerance),
            exact_weight=args.backward_exact_weight,
            seed=args.seed,
        )
    return arguments
