"""The fields of GRPOConfig that configure the loss: those of LossConfig and of its surrogates."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, get_type_hints

from transformers import TrainingArguments

from grpo_kernels import Bounded, LossConfig
from grpo_kernels.losses import LOSSES
from grpo_trainer.config.checks import Count, Options, number_in, options, setting


@dataclass
class BackwardFields:
    """How the gradients of the LM head are computed, as ``linear_policy_loss`` offers it."""

    backward_tolerance: Annotated[
        float | None, number_in("a number in (0, 1)", lambda x: 0 < x < 1)
    ] = setting(
        None,
        "Relative error that the gradient of the logits may have, such as 2e-3: the backward then "
        "takes the probabilities that matter and a sample of the small ones, unbiased and seeded "
        "by `seed`. Default: exact.",
    )
    backward_exact_weight: bool = setting(
        True,
        "With backward_tolerance: keep the gradient of the head's own parameters exact, for the "
        "sake of Adam.",
    )
    activation_bytes: Count | None = setting(
        None,
        "Bytes that the head's forward may keep for its backward, in two passes, so that no logits "
        "are formed again; 0: nothing. Default: what a frozen head keeps, as large as the hidden "
        "states.",
    )


def backward_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of ``linear_policy_loss`` that ``args`` describes."""
    arguments: dict[str, Any] = {"activation_bytes": args.activation_bytes}
    if args.backward_tolerance is not None:
        arguments["backward"] = Bounded(
            tolerance=float(args.backward_tolerance),
            exact_weight=args.backward_exact_weight,
            seed=args.seed,
        )
    return arguments


# fields of LossConfig, whatever the loss; RolloutFields has other names for those of the correction
_GENERAL = {
    item.name
    for item in dataclasses.fields(LossConfig)
    if item.init and item.name != "surrogate" and not item.name.startswith("rollout_correction_")
}


def _help(owner: type) -> dict[str, str]:
    """Return field name to help, from the ``Args:`` sections of a class and its bases."""
    docs = [base.__doc__ or "" for base in reversed(owner.__mro__)]
    sections = [doc.partition("Args:")[2].partition("\n\n")[0] for doc in docs]
    entries = re.findall(r"^ {8}(\w+):(.*(?:\n {12}.*)*)", "\n".join(sections), re.M)
    return {name: " ".join(text.split()).replace("%", "%%") for name, text in entries}


def _mirrored() -> list[tuple[str, type, Any]]:
    """Return fields with the names, types and defaults of LossConfig and of the surrogates."""
    owners: dict[type, list[str]] = {LossConfig: []}
    for loss_type, loss in LOSSES.items():
        owners.setdefault(loss.surrogate, []).append(loss_type)
    mirrored: dict[str, tuple[type, Any, list[str]]] = {}
    for owner, losses in owners.items():
        texts, hints = _help(owner), get_type_hints(owner)
        prefix = f"{', '.join(losses)}: " if losses else ""
        for item in dataclasses.fields(owner):
            if owner is not LossConfig or item.name in _GENERAL:
                field = mirrored.setdefault(item.name, (hints[item.name], item.default, []))
                field[2].append(prefix + texts.get(item.name, ""))
    return [
        (name, hint, setting(default, " ".join(parts)))
        for name, (hint, default, parts) in mirrored.items()
    ]


_Mirrored = make_dataclass(
    "_Mirrored",
    _mirrored(),
    namespace={"__doc__": "The loss, as LossConfig has it.", "__module__": __name__},
)


@dataclass
class LossFields(_Mirrored):  # type: ignore[valid-type, misc]
    """A loss of one's own."""

    loss_kwargs: Options = setting(
        None, "Settings of the loss that have no option here, as of a registered one."
    )


def check_level(args: TrainingArguments, loss: LossConfig) -> None:
    """Warn of a level of the ratio that is not what the loss, or the level, was made for."""
    level, own = args.importance_sampling_level, loss.loss.ratio_level
    if level is None or loss.ratio_level is own:
        return
    if loss.ratio_level.per_sequence and not loss.aggregation.by_sequence:
        warnings.warn(
            f"importance_sampling_level: with {level!r}, {loss.loss_type} sums over tokens, so "
            "that a sequence counts by its length; gspo weights sequences alike, as its paper does",
            stacklevel=4,
        )
    if own.per_sequence and not loss.ratio_level.per_sequence:
        warnings.warn(
            f"importance_sampling_level: {loss.loss_type} is defined with "
            f"{loss.loss.importance_sampling_level!r}, got {level!r}",
            stacklevel=4,
        )


def loss_config(args: TrainingArguments) -> LossConfig:
    """Return the loss that ``args`` describes.

    Raises:
        ValueError: a value is out of range, or a setting is given that the loss does not have.
    """
    loss = LOSSES.get(str(args.loss_type))  # an unknown one is an error of LossConfig
    named = _GENERAL.union(loss.settings if loss else ())
    settings, changed = {}, set()
    for item in dataclasses.fields(_Mirrored):
        value = getattr(args, item.name)
        if value != item.default:
            changed.add(item.name)
        if item.name in named | changed:
            settings[item.name] = value
    for name, value in options("loss_kwargs", args.loss_kwargs).items():
        if name in LossConfig.__dataclass_fields__:
            raise ValueError(
                f"loss_kwargs: expected the loss's own settings, got {name!r}, which all losses "
                "have and which is set beside it"
            )
        if name in changed:
            raise ValueError(f"loss_kwargs: expected no {name!r} beside the option, got both")
        settings[name] = value
    config = LossConfig(**settings, **_correction(args))
    if config.aggregation.by_prompt:
        raise ValueError(
            f"loss_aggregation: expected another than {config.aggregation_name!r}, as the trainer "
            "tells no micro-batch the tokens of its prompts"
        )
    if config.exclude_zero_variance and config.aggregation.counts_tokens:
        raise ValueError(
            f"exclude_zero_variance: expected False with {config.aggregation_name!r}, as the "
            "trainer counts the tokens of all sequences"
        )
    return config


def _correction(args: TrainingArguments) -> dict[str, Any]:
    """Return the fields of LossConfig that correct for what the engine sampled from."""
    high, low = args.vllm_importance_sampling_clip_max, args.vllm_importance_sampling_clip_min
    if high is not None and low is not None and low >= high:
        raise ValueError(
            "vllm_importance_sampling_clip_min: expected a number below "
            f"vllm_importance_sampling_clip_max = {high!r}, got {low!r}"
        )
    on, mode = args.vllm_importance_sampling_correction, args.vllm_importance_sampling_mode
    return {
        "rollout_correction_mode": mode if on else None,
        "rollout_correction_max": high,
        "rollout_correction_min": low,
    }
