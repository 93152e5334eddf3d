"""LossConfig: the frozen configuration of a loss."""

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
    """A GRPO-family loss. Field names follow TRL's ``GRPOConfig`` if TRL has the field.

    It also accepts the settings of the loss's surrogate, such as ``epsilon`` of the clipped losses
    or the fields in your own surrogate: ``LossConfig(loss_type="sapo", sapo_temperature_pos=2)``.

    Args:
        loss_type: a name in ``grpo_kernels.losses.LOSSES``, which also has the paper of each loss.
        beta: weight of the KL penalty against the reference model; 0 needs no reference.
        importance_sampling_level: ``token``, ``sequence`` (GSPO) or ``sequence_token``
            (GSPO-token); None: the loss's default.
        bypass_mode: use ``rollout_logprobs`` as the old log-probabilities, so that ratios and trust
            regions are against the rollout engine. ``old_logprobs`` are then only used for tokens
            that the engine did not report, and weighting by ``rollout_correction_mode`` has no
            effect. None: the loss's default.
        temperature: the sampling temperature, which divides the logits.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``abs`` (J. Schulman, "Approximating KL Divergence",
            2020).
        use_bias_correction_kl: multiply the KL estimate by the importance ratio
            (arXiv:2512.02556).
        loss_aggregation: how the losses of the tokens become one: ``token_mean`` over the
            micro-batch; ``window_token_mean`` over the optimizer step; ``sequence_mean``, the mean
            of the sequences' means; ``sequence_sum``, the mean of the sequences' sums;
            ``fixed_length``, the sum over the tokens, divided by the number of sequences and by
            ``max_completion_length``; or ``prompt_mean``, the mean over prompts of the mean over
            each prompt's tokens. None: the loss's default.
        exclude_zero_variance: leave sequences without an advantage out of these means, for example
            if all completions of a prompt got the same reward (ScaleRL, arXiv:2510.13786). They
            have no loss. Counts that you pass to the batch must leave them out, too.
        max_completion_length: the constant length of dr_grpo, in tokens.
        entropy_coef: weight of the entropy bonus.
        top_entropy_quantile: share of the tokens that are trained: those with the highest entropy
            (arXiv:2506.01939).
        off_policy_mask_threshold: drop sequences with a negative advantage that drifted by more
            than this many nats per token (arXiv:2512.02556); None: off.
        rollout_correction_mode: how to correct for the difference between policy and rollout
            engine, if the batch has ``rollout_logprobs``; None: no correction. Weighting modes
            multiply the loss by the importance ratio, of the token or of its whole sequence:
            ``token_truncate`` and ``sequence_truncate`` clamp it to the bounds; ``token_mask`` and
            ``sequence_mask`` set it to 0 outside the bounds; ``geometric_mask`` sets the sequence's
            ratio to 0 if its geometric mean over the tokens is outside the bounds. Rejection modes
            only keep or drop, as in verl: by the inverse ratio, the engine's probability over the
            old policy's (``token_k1``, ``sequence_sum_k1``, and its geometric mean
            ``sequence_mean_k1``), or by the estimate k2 or k3 of the KL divergence (``token_k3``,
            ``sequence_sum_k3``, ``sequence_mean_k3``, ``sequence_max_k3``, and the same with k2).
        rollout_correction_max, rollout_correction_min: bounds of the ratio, or of the estimate;
            None: unbounded.

    Raises:
        ValueError: a value is out of range, or a name is unknown; the message lists known names.
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
    surrogate: Surrogate = field(default=None)  # type: ignore[assignment]  # from its settings
    # () on the CPU: identifies the loss in a compiled graph
    registry_key: Tensor = field(init=False, repr=False, compare=False)

    def __init__(self, **settings: Any) -> None:
        for item in fields(self):
            if item.init:
                object.__setattr__(self, item.name, settings.pop(item.name, item.default))
        check_fields(self)
        object.__setattr__(self, "surrogate", self._surrogate(settings))
        if self.surrogate.needs_token_ratios and self.ratio_level.per_sequence:
            raise ValueError(
                f"importance_sampling_level: expected 'token' for {self.loss_type}, which computes "
                f"sequence ratios itself, got {self.importance_sampling_level!r}"
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
        """Copy through the constructor, since ``registry_key`` belongs to the process."""
        settings = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return partial(LossConfig, **settings), ()

    @staticmethod
    def of_registry_key(key: Tensor) -> LossConfig:
        """Return the config with this ``registry_key``."""
        return _alive[int(key)]

    @property
    def loss(self) -> NamedLoss:
        """The loss that ``loss_type`` names."""
        return LOSSES[self.loss_type]

    @property
    def aggregation(self) -> terms.Aggregation:
        """How the losses of the tokens become one."""
        return terms.AGGREGATIONS[self.aggregation_name]

    @property
    def aggregation_name(self) -> str:
        """``loss_aggregation``, or the default of the loss."""
        return self.loss_aggregation or self.loss.aggregation

    @property
    def ratio_level(self) -> terms.RatioLevel:
        """Whether the importance ratio is the token's or the sequence's."""
        level = self.importance_sampling_level
        return self.loss.ratio_level if level is None else terms.RATIO_LEVELS[level]

    @property
    def correction_mode(self) -> terms.CorrectionMode | None:
        """How the difference from the rollout engine is corrected; None: it isn't."""
        name = self.rollout_correction_mode
        mode = None if name is None else terms.CORRECTION_MODES[name]
        # with bypass_mode the ratio already is this weight
        return None if mode is None or (mode.weighs and self.bypasses) else mode

    @property
    def bypasses(self) -> bool:
        """Whether the ratio is against the rollout engine."""
        return self.loss.bypass_mode if self.bypass_mode is None else self.bypass_mode

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself needs the entropy, not only its metrics."""
        return self.entropy_coef != 0 or self.top_entropy_quantile < 1

    def scope(self, has_rollout: bool = False) -> str:
        """Return what a token's loss depends on.

        ``token``: the token itself; ``sequence``: all tokens of its sequence; ``prefix``: these
        and their order; ``batch``: all tokens.
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
        """Return the given surrogate, or a new one, with these settings."""
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
