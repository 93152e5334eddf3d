"""The settings of a run, some of which may change while it goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from grpo_kernels import LossConfig
from grpo_trainer.common import hint
from grpo_trainer.config.grpo_config import GRPOConfig
from grpo_trainer.config.loss import loss_config

_OF_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_OF_THE_LOSS = (
    *("beta", "epsilon", "epsilon_high"),
    *("entropy_coef", "off_policy_mask_threshold", "top_entropy_quantile"),
)
CHANGEABLE = (*_OF_SAMPLING, *_OF_THE_LOSS)


class Settings:
    """The arguments of a run, and the loss that they describe.

    What is changed takes effect with the next generation batch, so that completions are trained on
    by the values that they were sampled by. A checkpoint holds it.
    """

    def __init__(self, args: GRPOConfig) -> None:
        self._began = args
        self.args = args  # with all changes
        self.in_effect = args
        self.loss = _loss_of(args)  # in effect
        self._changed: dict[str, Any] = {}
        self._changed_in_effect: dict[str, Any] = {}

    def change(self, **values: Any) -> None:
        """Change fields for the generation batches to come.

        Raises:
            ValueError: the run cannot go on with a value, or a field cannot change; then none does.
        """
        args = self.args
        for name, value in values.items():
            self._check(name, value)
            args = args.changed(name, value)
        self.args, self._changed = args, self._changed | values

    def take_effect(self) -> None:
        """Go by what was changed, before a generation batch."""
        if self.in_effect is not self.args:
            self.in_effect, self._changed_in_effect = self.args, self._changed
            self.loss = _loss_of(self.args)

    def state(self) -> dict[str, Any]:
        return {"set": self._changed, "in_effect": self._changed_in_effect}

    def restore(self, state: dict[str, Any]) -> None:
        self.args, self._changed = self._began, {}
        self.change(**state["in_effect"])
        self.take_effect()
        self.change(**state["set"])

    def _check(self, name: str, value: Any) -> None:
        if name not in CHANGEABLE:
            raise ValueError(
                f"{name}: expected one of {', '.join(CHANGEABLE)}, which can change during a run"
                f"{hint(name, CHANGEABLE)}"
            )
        if name in _OF_SAMPLING and self.args.generation_batches_ahead:
            raise ValueError(
                f"{name}: expected no other value with generation_batches_ahead, whose next "
                f"completions are being sampled, got {value!r}"
            )
        if name == "beta" and value != 0 and self._began.beta == 0:
            raise ValueError(
                f"beta: expected 0 in a run that began with it, without a reference, got {value!r}"
            )
        if name == "entropy_coef" and self.args.use_adaptive_entropy:
            raise ValueError(
                f"entropy_coef: expected no other value with use_adaptive_entropy, got {value!r}"
            )


def _loss_of(args: GRPOConfig) -> LossConfig:
    loss = loss_config(args)
    # with adaptive entropy the coefficient comes with each batch: no config changes
    return replace(loss, entropy_coef=1.0) if args.use_adaptive_entropy else loss
