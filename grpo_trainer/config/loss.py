"""The fields of GRPOConfig that configure the loss: those of LossConfig and of its surrogates."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import dataclass, make_dataclass
from typing import Any, get_type_hints

from transformers import TrainingArguments

from grpo_kernels import Bounded, LossConfig
from grpo_kernels.losses import LOSSES, Surrogate
from grpo_trainer.config.checks import setting
from grpo_trainer.config.engines import correction_options


@dataclass
class BackwardFields:
    """How the gradients of the LM head are computed, as ``linear_policy_loss`` offers it."""

    backward_tolerance: float | None = setting(
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
    activation_bytes: int | None = setting(
        None,
        "Bytes that the head's forward may keep for its backward, in two passes, so that no logits "
        "are formed again; 0: nothing. Default: what a frozen head keeps, as large as the hidden "
        "states.",
    )


def backward_options(args: TrainingArguments) -> dict[str, Any]:
    """Return the arguments of ``linear_policy_loss`` that ``args`` describes.

    Raises:
        ValueError: a value is out of range, or does not fit to the loss.
    """
    tolerance = args.backward_tolerance
    if tolerance is None:
        if not args.backward_exact_weight:
            raise ValueError(
                "backward_exact_weight: expected True without backward_tolerance, where all "
                f"gradients are exact, got {args.backward_exact_weight!r}"
            )
        return {"activation_bytes": args.activation_bytes}
    number = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not number or not 0 < tolerance < 1:
        raise ValueError(f"backward_tolerance: expected a number in (0, 1), got {tolerance!r}")
    for name in ("entropy_coef", "use_adaptive_entropy", "use_sampling_mask"):
        if value := getattr(args, name):
            raise ValueError(
                f"backward_tolerance: expected None with {name}={value!r}, whose gradient is exact "
                f"alone, got {tolerance!r}"
            )
    bounded = Bounded(
        tolerance=float(tolerance), exact_weight=args.backward_exact_weight, seed=args.seed
    )
    return {"backward": bounded, "activation_bytes": args.activation_bytes}


# these have names of their own in GRPOConfig: see RolloutFields
_CORRECTION = "rollout_correction_"


def _general() -> list[dataclasses.Field]:
    """Return the fields of LossConfig, whatever the loss."""
    return [
        item
        for item in dataclasses.fields(LossConfig)
        if item.init and item.name != "surrogate" and not item.name.startswith(_CORRECTION)
    ]


def _surrogates() -> dict[type[Surrogate], list[str]]:
    """Return the surrogates, with the losses that are made of each."""
    found: dict[type[Surrogate], list[str]] = {}
    for name, loss in LOSSES.items():
        found.setdefault(loss.surrogate, []).append(name)
    return found


def _help(owner: type) -> dict[str, str]:
    """Return field name to help, from the ``Args:`` section of a docstring."""
    section = (owner.__doc__ or "").partition("Args:")[2].partition("\n\n")[0]
    entries = re.split(r"\n {8}(?=\w)", section)
    texts = (entry.partition(":") for entry in entries)
    return {
        name.strip(): " ".join(text.split()).replace("%", "%%")
        for names, _, text in texts
        for name in names.split(",")
    }


def _mirrored() -> list[tuple[str, type, Any]]:
    """Return fields with the names, types and defaults of LossConfig and of the surrogates."""
    made: dict[str, tuple[type, Any, list[str]]] = {}
    owners: list[tuple[type, list[str]]] = [(LossConfig, []), *_surrogates().items()]
    for owner, losses in owners:
        texts, hints = _help(owner), get_type_hints(owner)
        for item in _general() if owner is LossConfig else dataclasses.fields(owner):
            prefix = f"{', '.join(losses)}: " if losses else ""
            _, _, parts = made.setdefault(item.name, (hints[item.name], item.default, []))
            parts.append(prefix + texts.get(item.name, ""))
    return [
        (name, hint, setting(default, " ".join(parts)))
        for name, (hint, default, parts) in made.items()
    ]


_Mirrored = make_dataclass(
    "_Mirrored",
    _mirrored(),
    namespace={"__doc__": "The loss, as LossConfig has it.", "__module__": __name__},
)


@dataclass
class LossFields(_Mirrored):  # type: ignore[valid-type, misc]
    """A loss of one's own."""

    loss_kwargs: dict[str, Any] | str | None = setting(
        None, "Settings of the loss that have no option here, as of a registered one."
    )


def check_level(args: TrainingArguments, loss: LossConfig) -> None:
    """Warn of a level of the ratio that is not what the loss, or the level, was made for."""
    given, own = args.importance_sampling_level, loss.loss.ratio_level
    if given is None or loss.ratio_level is own:
        return
    if loss.ratio_level.per_sequence and not loss.aggregation.by_sequence:
        warnings.warn(
            f"importance_sampling_level: with {given!r}, {loss.loss_type} sums over tokens, so "
            "that a sequence counts by its length; gspo weights sequences alike, as its paper does",
            stacklevel=4,
        )
    if own.per_sequence and not loss.ratio_level.per_sequence:
        warnings.warn(
            f"importance_sampling_level: {loss.loss_type} is defined with "
            f"{loss.loss.importance_sampling_level!r}, got {given!r}",
            stacklevel=4,
        )


def loss_config(args: TrainingArguments) -> LossConfig:
    """Return the loss that ``args`` describes.

    Raises:
        ValueError: a value is out of range, or a setting is given that the loss does not have.
    """
    general = {item.name: getattr(args, item.name) for item in _general()}
    return LossConfig(**general, **correction_options(args), **_settings(args))


def _settings(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of the loss's surrogate, and, for the error, what it does not know."""
    known = args.loss_type in tuple(LOSSES)  # which any value can be asked for
    own = LOSSES[args.loss_type].settings if known else ()
    general = {item.name for item in _general()}
    given, changed = {}, set()
    for item in dataclasses.fields(_Mirrored):
        value = getattr(args, item.name)
        if value != item.default:
            changed.add(item.name)
        if item.name not in general and (item.name in own or item.name in changed):
            given[item.name] = value
    more = args.loss_kwargs or {}
    if not isinstance(more, dict):
        raise ValueError(f"loss_kwargs: expected settings by name, got {more!r}")
    options = {item.name for item in dataclasses.fields(LossConfig)}
    for name in more:
        if name in options:
            raise ValueError(
                f"loss_kwargs: expected the loss's own settings, got {name!r}, which all losses "
                "have and which is set beside it"
            )
        if name in given and name in changed:
            raise ValueError(f"loss_kwargs: expected no {name!r} beside the option, got both")
    return given | more
