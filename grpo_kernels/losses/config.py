"""LossConfig: one frozen object that says which loss is computed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

from grpo_kernels.batch.opaque import Opaque
from grpo_kernels.losses.gates import CORRECTION_MODES
from grpo_kernels.losses.kl import KL_ESTIMATORS
from grpo_kernels.losses.ratios import RATIO_LEVELS, RatioLevel
from grpo_kernels.losses.registry import LOSSES, NamedLoss, check_name
from grpo_kernels.losses.surrogates import SURROGATES, Surrogate
from grpo_kernels.losses.terms import widest


@dataclass(frozen=True, kw_only=True)
class LossConfig(Opaque):
    """A GRPO-family loss. Field names follow TRL's ``GRPOConfig`` where it has them.

    Args:
        loss_type: a name of ``grpo_kernels.losses.LOSSES``.
        beta: weight of the KL penalty against the reference model; 0 needs no reference.
        epsilon: lower clip distance; the ratio is clipped to ``1 - epsilon``.
        epsilon_high: upper clip distance, ``epsilon`` if None. For cispo the bound itself.
        delta: cap of the unclipped ratio (INTELLECT-2); None: no cap.
        dual_clip: bound ``c > 1`` of dual-clip PPO for negative advantages; None: off.
        importance_sampling_level: ``token``, ``sequence`` (GSPO) or ``sequence_token``
            (GSPO-token); None: the named loss's own.
        temperature: the sampling temperature, which divides the logits.
        kl_estimator: ``k1``, ``k2``, ``k3`` or ``abs``.
        use_bias_correction_kl: multiply the KL estimate by the importance ratio
            (arXiv:2512.02556).
        max_completion_length: the constant length of dr_grpo, in tokens.
        sapo_temperature_pos, sapo_temperature_neg: SAPO's gates by sign of the advantage.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: VESPO's gamma weights.
        gmpo_clip: GMPO's bound on log-ratios, in nats.
        entropy_coef: weight of the entropy bonus.
        top_entropy_quantile: share of the tokens, those of highest entropy, that are trained.
        off_policy_mask_threshold: drop sequences of negative advantage that drifted by more nats
            per token (arXiv:2512.02556); None: off.
        rollout_correction_mode: ``token_truncate``, ``token_mask``, ``sequence_truncate`` or
            ``sequence_mask``, used when the batch has ``rollout_logprobs``; None: no correction.
        rollout_correction_max, rollout_correction_min: bounds of that weight; None: unbounded.

    Raises:
        ValueError: a value is out of range or a name unknown; the message lists the known ones.
    """

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    dual_clip: float | None = None
    importance_sampling_level: str | None = None
    temperature: float = 1.0
    kl_estimator: str = "k3"
    use_bias_correction_kl: bool = True
    max_completion_length: int | None = None
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    gmpo_clip: float = 0.4
    entropy_coef: float = 0.0
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    rollout_correction_mode: str | None = "sequence_mask"
    rollout_correction_max: float | None = 3.0
    rollout_correction_min: float | None = None

    def __post_init__(self) -> None:
        check_name("loss_type", self.loss_type, LOSSES)
        check_name("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        if self.importance_sampling_level is not None:
            check_name("importance_sampling_level", self.importance_sampling_level, RATIO_LEVELS)
        if self.rollout_correction_mode is not None:
            check_name("rollout_correction_mode", self.rollout_correction_mode, CORRECTION_MODES)
        self._check_ranges()
        self._check_combinations()
        self.surrogate.validate(self)
        self._pack(self)

    @property
    def loss(self) -> NamedLoss:
        """What ``loss_type`` stands for."""
        return LOSSES[self.loss_type]

    @property
    def surrogate(self) -> Surrogate:
        return SURROGATES[self.loss.surrogate]

    @property
    def ratio_level(self) -> RatioLevel:
        return RATIO_LEVELS[self.importance_sampling_level or self.loss.importance_sampling_level]

    @property
    def upper_epsilon(self) -> float:
        """``epsilon_high``, or ``epsilon`` when it is not given."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss itself, not only its metrics, reads the entropy."""
        return self.entropy_coef != 0 or self.top_entropy_quantile < 1

    def scope(self, has_rollout: bool = False) -> str:
        """How far one token's gradient reaches: ``token``, ``sequence`` or ``batch``."""
        scopes = [self.surrogate.scope, self.ratio_level.scope]
        if self.off_policy_mask_threshold is not None:
            scopes.append("sequence")
        if has_rollout and self.rollout_correction_mode is not None:
            mode = CORRECTION_MODES[self.rollout_correction_mode]
            scopes.append("sequence" if mode.per_sequence else "token")
        if self.top_entropy_quantile < 1:
            scopes.append("batch")
        return widest(*scopes)

    def _check_ranges(self) -> None:
        positive = ("temperature", "sapo_temperature_pos", "sapo_temperature_neg", "gmpo_clip")
        not_negative = ("beta", "epsilon", "epsilon_high", "vespo_k_pos", "vespo_k_neg",
                        "vespo_lambda_pos", "vespo_lambda_neg")  # fmt: skip
        any_sign = ("entropy_coef", "off_policy_mask_threshold")
        for name in positive:
            self._check(name, "a finite number > 0", lambda value: value > 0)
        for name in not_negative:
            self._check(name, "a finite number >= 0", lambda value: value >= 0)
        for name in any_sign:
            self._check(name, "a finite number", lambda value: True)
        self._check("delta", "a number > 0", lambda value: value > 0)
        self._check("dual_clip", "a number > 1", lambda value: value > 1)
        self._check("top_entropy_quantile", "a number in (0, 1]", lambda value: 0 < value <= 1)
        self._check("max_completion_length", "a number >= 1", lambda value: value >= 1)
        self._check("rollout_correction_min", "a number >= 0", lambda value: value >= 0)
        self._check("rollout_correction_max", "a number > 0", lambda value: value > 0)

    def _check(self, name: str, expected: str, accepts) -> None:
        value = getattr(self, name)
        optional = type(self).__dataclass_fields__[name].default is None
        if value is None and (optional or name.startswith("rollout_correction")):
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not accepts(value):
            raise ValueError(f"{name}: expected {expected}, got {value!r}")

    def _check_combinations(self) -> None:
        if self.loss.surrogate == "clip" and self.epsilon >= 1:
            raise ValueError(f"epsilon: expected a number below 1, got {self.epsilon!r}")
        if self.loss.aggregation == "fixed_length" and self.max_completion_length is None:
            raise ValueError(
                f"max_completion_length: expected the constant length that {self.loss_type} "
                "divides by, got None"
            )
        for name in ("delta", "dual_clip"):
            if getattr(self, name) is not None and self.loss.surrogate != "clip":
                raise ValueError(
                    f"{name}: expected None for {self.loss_type}, which clips no ratio, "
                    f"got {getattr(self, name)!r}"
                )
        low, high = self.rollout_correction_min, self.rollout_correction_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                "rollout_correction_min: expected a number below rollout_correction_max = "
                f"{high!r}, got {low!r}"
            )
        if self.loss.surrogate == "cispo" and self.upper_epsilon < 1:
            warnings.warn(
                "cispo uses epsilon_high as the raw upper bound of the importance weight; "
                f"{self.upper_epsilon} scales every update down (ScaleRL uses 5.0)",
                stacklevel=4,
            )
