"""The fields of GRPOConfig that configure the loss: those of LossConfig."""

from __future__ import annotations

import dataclasses
import re
import warnings
from dataclasses import field, make_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from grpo_kernels import LossConfig
from grpo_kernels.losses.ratios import RATIO_LEVELS
from grpo_trainer.config_rollout import correction_options

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig

# these have names of their own in GRPOConfig: see RolloutFields
_CORRECTION = "rollout_correction_"
_SUM_TOKENS = ("token_mean", "window_token_mean", "fixed_length")  # aggregations


def _loss_fields() -> list[dataclasses.Field]:
    return [
        item for item in dataclasses.fields(LossConfig) if not item.name.startswith(_CORRECTION)
    ]


def _loss_help() -> dict[str, str]:
    """Field name to help, from the ``Args:`` section of LossConfig's docstring."""
    section = (LossConfig.__doc__ or "").partition("Args:")[2].partition("\n\n")[0]
    entries = re.split(r"\n {8}(?=\w)", section)
    texts = (entry.partition(":") for entry in entries)
    return {
        name.strip(): " ".join(text.split()).replace("%", "%%")
        for names, _, text in texts
        for name in names.split(",")
    }


def _mirrored_field(item: dataclasses.Field, text: str) -> tuple[str, type, Any]:
    hint = get_type_hints(LossConfig)[item.name]
    return item.name, hint, field(default=item.default, metadata={"help": text})


# Fields of LossConfig, with its names, types and defaults: the loss is configured in one place.
LossFields = make_dataclass(
    "LossFields",
    [_mirrored_field(item, _loss_help().get(item.name, "")) for item in _loss_fields()],
)


def check_level(args: GRPOConfig, loss: LossConfig) -> None:
    """Warn of a level of the ratio that is not what the loss, or the level, was made for."""
    given, own = args.importance_sampling_level, loss.loss.importance_sampling_level
    if given in (None, own):
        return
    if loss.ratio_level.per_sequence and loss.loss.aggregation in _SUM_TOKENS:
        warnings.warn(
            f"importance_sampling_level: with {given!r}, {loss.loss_type} sums over tokens, so "
            "that a sequence counts by its length; gspo weights sequences alike, as its paper does",
            stacklevel=4,
        )
    if RATIO_LEVELS[own].per_sequence and not loss.ratio_level.per_sequence:
        warnings.warn(
            f"importance_sampling_level: {loss.loss_type} is defined with {own!r}, got {given!r}",
            stacklevel=4,
        )


def loss_config(args: GRPOConfig) -> LossConfig:
    """The loss that ``args`` describes."""
    mirrored = {item.name: getattr(args, item.name) for item in _loss_fields()}
    return LossConfig(**mirrored, **correction_options(args))
