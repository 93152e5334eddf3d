"""LossConfig: one frozen object that says which loss is computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.common import NOT_NEGATIVE, POSITIVE, check_fields, choice, hint, number
from grpo_kernels.losses import terms
from grpo_kernels.losses.registry import LOSSES, NamedLoss
from grpo_kernels.losses.surrogates import Surrogate


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
        bypass_mode: take ``rollout_logprobs`` as the old ones: ratios and trust regions are against
            the rollout engine, no ``old_logprobs`` are needed (or read, where the engine knows its
            own), and no weight of ``rollout_correction_mode`` is left to correct with; None: the
            named loss's own.
        temperature: the sampling temperature, which divides the logits.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``abs``.
        use_bias_correction_kl: multiply the KL estimate by the importance ratio
            (arXiv:2512.02556).
        loss_aggregation: how the tokens' losses become one: ``token_mean`` of the micro-batch,
            ``window_token_mean`` of the optimizer step, ``sequence_mean`` of sequence means,
            ``sequence_sum``, ``fixed_length`` (a sum over sequences and ``max_completion_length``)
            or ``prompt_mean`` (of the means over each prompt's tokens); None: the named loss's own.
        exclude_zero_variance: sequences without an advantage, as where all completions of a prompt
            got the same reward, do not count in these means, and have no loss (ScaleRL,
            arXiv:2510.13786). Numbers that the batch is given have to leave them out, too.
        max_completion_length: the constant length of dr_grpo, in tokens.
        entropy_coef: weight of the entropy bonus.
        top_entropy_quantile: share of the tokens, those of highest entropy, that are trained.
        off_policy_mask_threshold: drop sequences of negative advantage that drifted by more nats
            per token (arXiv:2512.02556); None: off.
        rollout_correction_mode: how the loss is corrected for what the rollout engine sampled from,
            when the batch has ``rollout_logprobs``; None: it is not. The weight is the importance
            ratio, of the token or of its whole sequence: ``token_truncate`` and
            ``sequence_truncate`` clamp it to the bounds, ``token_mask`` and ``sequence_mask`` make
            it 0 outside of them, ``geometric_mask`` where its geometric mean over the tokens is
            outside. The others only keep or drop, as in verl: by the inverse ratio, the engine's
            probability over the old policy's (``token_k1``, ``sequence_sum_k1``,
            ``sequence_mean_k1``: its geometric mean), or by an estimate k2 or k3 of the KL
            divergence (``token_k3``, ``sequence_sum_k3``, ``sequence_mean_k3``,
            ``sequence_max_k3``; k2 likewise).
        rollout_correction_max, rollout_correction_min: bounds of the ratio, or of the estimate;
            None: unbounded.

    Raises:
        ValueError: a value is out of range, or a name unknown; the message lists the known ones.
    """

    loss_type: str = choice("dapo", LOSSES)
    beta: float = number(0.0, *NOT_NEGATIVE)
    importance_sampling_level: str | None = choice(None, terms.RATIO_LEVELS, optional=True)
    bypass_mode: bool | None = choice(None, (True, False), optional=True)
    temperature: float = number(1.0, *POSITIVE)
    kl_estimator: str = choice("k3", terms.KL_ESTIMATORS)
    use_bias_correction_kl: bool = choice(True, (True, False))
    loss_aggregation: str | None = choice(None, terms.AGGREGATIONS, optional=True)
    exclude_zero_variance: bool = choice(False, (True, False))
    max_completion_length: int | None = number(
        None, "a number >= 1", lambda x: x >= 1, optional=True
    )
    entropy_coef: float = number(0.0)
    top_entropy_quantile: float = number(1.0, "a number in (0, 1]", lambda x: 0 < x <= 1)
    off_policy_mask_threshold: float | None = number(None, optional=True)
    rollout_correction_mode: str | None = choice(
        "sequence_mask", terms.CORRECTION_MODES, optional=True
    )
    rollout_correction_max: float | None = number(3.0, *POSITIVE, optional=True)
    rollout_correction_min: float | None = number(None, *NOT_NEGATIVE, optional=True)
    surrogate: Surrogate = field(default=None)  # type: ignore[assignment]  # made of its settings
    # () on the CPU: a compiled graph is told the loss by it
    registry_key: Tensor = field(init=False, repr=False, compare=False)

    def __init__(self, **settings: Any) -> None:
        for item in fields(self):
            if item.init:
                object.__setattr__(self, item.name, settings.pop(item.name, item.default))
        check_fields(self)
        object.__setattr__(self, "surrogate", self._surrogate(settings))
        if self.surrogate.needs_token_ratios and self.ratio_level.per_sequence:
            raise ValueError(
                f"importance_sampling_level: {self.loss_type} forms the ratio of a sequence itself "
                f"and expects 'token', got {self.importance_sampling_level!r}"
            )
        if self.max_completion_length is None and self.aggregation.divides_by_max_length:
            raise ValueError(
                f"max_completion_length: expected the constant length that {self.loss_type} "
                f"divides by ({self.aggregation_name}), got None"
            )
        low, high = self.rollout_correction_min, self.rollout_correction_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "rollout_correction_min: expected a number below rollout_correction_max = "
                f"{high!r}, got {low!r}"
            )
        key = next(_numbers)
        _alive[key] = self
        object.__setattr__(self, "registry_key", host.to_host(key))

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
    def aggregation(self) -> terms.Aggregation:
        """How the tokens' losses become one."""
        return terms.AGGREGATIONS[self.aggregation_name]

    @property
    def aggregation_name(self) -> str:
        """The loss's own aggregation, or the one in its place."""
        return self.loss_aggregation or self.loss.aggregation

    @property
    def ratio_level(self) -> terms.RatioLevel:
        """Whose importance ratio the loss takes: the token's or the sequence's."""
        level = self.importance_sampling_level
        return self.loss.ratio_level if level is None else terms.RATIO_LEVELS[level]

    @property
    def correction_mode(self) -> terms.CorrectionMode | None:
        """How the difference to the rollout engine is corrected; None: it is not."""
        name = self.rollout_correction_mode
        mode = None if name is None else terms.CORRECTION_MODES[name]
        # with bypass_mode the ratio is that weight
        return None if mode is None or (mode.weighs and self.bypasses) else mode

    @property
    def bypasses(self) -> bool:
        """Whether the ratio is against the rollout engine."""
        return self.loss.bypass_mode if self.bypass_mode is None else self.bypass_mode

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself, not only its metrics, reads the entropy."""
        return self.entropy_coef != 0 or self.top_entropy_quantile < 1

    def scope(self, has_rollout: bool = False) -> str:
        """Return what a token's loss depends on.

        ``token``: on itself; ``sequence``: on the tokens of its sequence; ``prefix``: on their
        order as well; ``batch``: on all tokens.
        """
        if self.top_entropy_quantile < 1:
            return "batch"
        own = self.surrogate.scope
        mode = self.correction_mode
        corrected = has_rollout and mode is not None and mode.per_sequence
        gated = self.off_policy_mask_threshold is not None
        by_sequence = self.ratio_level.per_sequence or corrected or gated
        return "sequence" if own == "token" and by_sequence else own

    def _surrogate(self, settings: dict[str, Any]) -> Surrogate:
        """Return the surrogate with these settings: the one that is given, or a new one."""
        loss = self.loss
        surrogate = self.surrogate
        for name in [name for name in settings if name not in loss.settings]:
            known = [item.name for item in fields(self) if item.init]
            own = ", ".join(loss.settings) or "none"
            raise ValueError(
                f"{name}: expected a setting of {self.loss_type} ({own}) or one of "
                f"{', '.join(known)}{hint(name, [*loss.settings, *known])}"
            )
        if surrogate is None:
            return loss.surrogate(**settings)
        if type(surrogate) is not loss.surrogate:
            kind = loss.surrogate.__name__
            raise ValueError(
                f"surrogate: expected a {kind} for {self.loss_type}, got {surrogate!r}"
            )
        return replace(surrogate, **settings)


_numbers = itertools.count()
_alive: WeakValueDictionary[int, LossConfig] = WeakValueDictionary()
