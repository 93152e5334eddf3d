"""The fields of GRPOConfig that choose the backward of the LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from grpo_kernels import Bounded
from grpo_trainer.config.setting import setting


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
