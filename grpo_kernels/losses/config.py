"""LossConfig: one frozen object that says which loss is computed."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from grpo_kernels.arguments import NOT_NEGATIVE, POSITIVE, check_name, check_number
from grpo_kernels.batch import host
from grpo_kernels.losses.surrogates import LOSSES, NamedLoss, Surrogate
from grpo_kernels.losses.terms import (
    AGGREGATIONS,
    CORRECTION_MODES,
    KL_ESTIMATORS,
    RATIO_LEVELS,
    Aggregation,
    CorrectionMode,
    RatioLevel,
    max_local_vocab,
)


@dataclass(frozen=True, kw_only=True, init=False)
class LossConfig:
    """A GRPO-family loss. Field names follow TRL's ``GRPOConfig`` where it has them.

    Beside these it takes the settings of the loss's surrogate, such as ``epsilon`` of the clipped
    losses or what a loss of your own has: ``LossConfig(loss_type="sapo", sapo_temperature_pos=2)``.

    Args:
        loss_type: a name of ``grpo_kernels.losses.LOSSES``.
        beta: weight of the KL penalty against the reference model; 0 needs no reference.
        importance_sampling_level: ``token``, ``sequence`` (GSPO) or ``sequence_token``
            (GSPO-token); None: the named loss's own.
        temperature: the sampling temperature, which divides the logits.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``abs``.
        use_bias_correction_kl: multiply the KL estimate by the importance ratio
            (arXiv:2512.02556).
        max_completion_length: the constant length of dr_grpo, in tokens.
        entropy_coef: weight of the entropy bonus.
        top_entropy_quantile: share of the tokens, those of highest entropy, that are trained.
        off_policy_mask_threshold: drop sequences of negative advantage that drifted by more nats
            per token (arXiv:2512.02556); None: off.
        rollout_correction_mode: ``token_truncate``, ``token_mask``, ``sequence_truncate`` or
            ``sequence_mask``, used when the batch has ``rollout_logprobs``; None: no correction.
        rollout_correction_max, rollout_correction_min: bounds of that weight; None: unbounded.

    Raises:
        ValueError: a value is out of range, or a name unknown; the message lists the known ones.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    importance_sampling_level: str | None = None
    temperature: float = 1.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    max_completion_length: int | None = None
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    rollout_correction_mode: str | None = "sequence_mask"
    rollout_correction_max: float | None = 3.0
    rollout_correction_min: float | None = None
    surrogate: Surrogate = field(default=None)  # type: ignore[assignment]  # made of its settings
    # () on the CPU: a compiled graph is told the loss by it
    registry_key: Tensor = field(init=False, repr=False, compare=False)

    def __init__(self, **settings: Any) -> None:
        own = [item for item in fields(self) if item.init]
        values = {item.name: settings.pop(item.name, item.default) for item in own}
        check_name("loss_type", values["loss_type"], LOSSES)
        values["surrogate"] = _surrogate(values["loss_type"], values["surrogate"], settings)
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()
        number = next(_numbers)
        _alive[number] = self
        object.__setattr__(self, "registry_key", host.to_host(number))

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copy by the constructor: its number is of the process that it is in."""
        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return partial(LossConfig, **settings), ()

    @staticmethod
    def of_registry_key(key: Tensor) -> LossConfig:
        """Return the config whose ``registry_key`` it is."""
        return _alive[int(key)]

    @property
    def loss(self) -> NamedLoss:
        """What ``loss_type`` stands for."""
        return LOSSES[self.loss_type]

    @property
    def aggregation(self) -> Aggregation:
        return AGGREGATIONS[self.loss.aggregation]

    @property
    def ratio_level(self) -> RatioLevel:
        level = self.importance_sampling_level
        return self.loss.ratio_level if level is None else RATIO_LEVELS[level]

    @property
    def correction_mode(self) -> CorrectionMode | None:
        mode = self.rollout_correction_mode
        return None if mode is None else CORRECTION_MODES[mode]

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself, not only its metrics, reads the entropy."""
        return self.entropy_coef != 0 or self.top_entropy_quantile < 1

    def scope(self, has_rollout: bool = False) -> str:
        """Return how far one token's gradient reaches: ``token``, ``sequence`` or ``batch``."""
        scopes = [self.surrogate.scope, self.ratio_level.scope]
        if self.off_policy_mask_threshold is not None:
            scopes.append("sequence")
        if has_rollout and self.correction_mode is not None:
            scopes.append("sequence" if self.correction_mode.per_sequence else "token")
        if self.top_entropy_quantile < 1:
            scopes.append("batch")
        return max_local_vocab(*scopes)

    def _check(self) -> None:
        for name, known, optional in _NAMES:
            check_name(name, getattr(self, name), known, optional=optional)
        for name, expected, optional in _RANGES:
            check_number(name, getattr(self, name), *expected, optional=optional)
        if self.surrogate.needs_token_ratios and self.ratio_level.scope != "token":
            raise ValueError(
                f"importance_sampling_level: {self.loss_type} forms the ratio of a sequence itself "
                f"and expects 'token', got {self.importance_sampling_level!r}"
            )
        if self.max_completion_length is None and self.aggregation.divides_by_max_length:
            raise ValueError(
                f"max_completion_length: expected the constant length that {self.loss_type} "
                "divides by, got None"
            )
        low, high = self.rollout_correction_min, self.rollout_correction_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "rollout_correction_min: expected a number below rollout_correction_max = "
                f"{high!r}, got {low!r}"
            )


# settings that are names, the known ones, and whether None is another
_NAMES: tuple[tuple[str, Collection[Any], bool], ...] = (
    ("kl_estimator", KL_ESTIMATORS, False),
    ("use_bias_correction_kl", (True, False), False),
    ("importance_sampling_level", RATIO_LEVELS, True),
    ("rollout_correction_mode", CORRECTION_MODES, True),
)
# settings that are numbers, what is expected of them, and whether None will do
_RANGES: tuple[tuple[str, tuple[Any, ...], bool], ...] = (
    ("temperature", POSITIVE, False),
    ("beta", NOT_NEGATIVE, False),
    ("entropy_coef", (), False),
    ("off_policy_mask_threshold", (), True),
    ("top_entropy_quantile", ("a number in (0, 1]", lambda x: 0 < x <= 1), False),
    ("max_completion_length", ("a number >= 1", lambda x: x >= 1), True),
    ("rollout_correction_min", NOT_NEGATIVE, True),
    ("rollout_correction_max", POSITIVE, True),
)
_numbers = itertools.count()
_alive: WeakValueDictionary[int, LossConfig] = WeakValueDictionary()


def _surrogate(loss_type: str, given: Surrogate | None, settings: dict[str, Any]) -> Surrogate:
    """Return the surrogate of the loss: ``given`` or a new one, with these settings."""
    loss = LOSSES[loss_type]
    for name in settings:
        if name not in loss.settings:
            known = [item.name for item in fields(LossConfig) if item.init]
            own = ", ".join(loss.settings) or "none"
            raise ValueError(
                f"{name}: expected a setting of {loss_type} ({own}) or one of {', '.join(known)}"
            )
    if given is None:
        return loss.surrogate(**settings)
    if type(given) is not loss.surrogate:
        raise ValueError(
            f"surrogate: expected a {loss.surrogate.__name__} for {loss_type}, got {given!r}"
        )
    return replace(given, **settings)
