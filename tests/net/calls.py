"""Whole calls in the emulator, forward and backward, each against the oracle."""

from __future__ import annotations

from typing import Any

import pytest

from tests.net import oracle
from tests.net.cases import LOSSES, Case
from tests.net.checks import check

_SHAPE: dict[str, Any] = dict(
    backend="triton", lengths=(3, 1, 5), depth=16, vocab=129, masked=True, advantages="some_zero"
)
_TERMS = {"beta": 0.04, "entropy_coef": 0.01}
_NEEDED = {
    "dr_grpo": {"max_completion_length": 9},
    "trm": {"trm_threshold": 0.05},
    "vaco": {"vaco_threshold": 0.05},
}
_OUTPUTS = ("logprobs", "entropy", "lse", "is_top1", "sum_sq_probs", "max_logit", "min_logit")

CALLS = {
    **{
        f"{loss}": Case(
            loss_type=loss,
            settings=_TERMS | _NEEDED.get(loss, {}),
            rollout="given" if loss in oracle.GATED else "absent",
            dtype="bfloat16",
            **_SHAPE,
        )
        for loss in LOSSES
    },
    "tokens' ratios by sequence": Case(
        settings={"importance_sampling_level": "sequence_token", "kl_estimator": "k1", "beta": 1.0},
        **_SHAPE,
    ),
    "off-policy mask and top entropy": Case(
        settings={"off_policy_mask_threshold": 0.05, "top_entropy_quantile": 0.7}, **_SHAPE
    ),
    "rollout correction": Case(
        rollout="given",
        settings={"rollout_correction_mode": "sequence_mask", "rollout_correction_max": 3.0},
        **_SHAPE,
    ),
    "several tiles": Case(dtype="bfloat16", tile_rows=16, **_SHAPE | {"lengths": (9, 17, 5)}),
    "two passes": Case(schedule="two_pass", dtype="bfloat16", **_SHAPE),
    "rows of one tile and more": Case(**_SHAPE | {"vocab": 4100, "lengths": (2,)}),
    "softcap, bias and scale": Case(
        softcap=2.0, bias=True, logit_scale=0.25, dtype="bfloat16", **_SHAPE
    ),
    "adapter": Case(lora=3, trained="lora", dtype="bfloat16", **_SHAPE),
    "bounded": Case(bounded=True, dtype="bfloat16", **_SHAPE),
    "sampling mask": Case(sampling_mask=True, **_SHAPE),
    "fp16": Case(dtype="float16", **_SHAPE),
    "rounded logits": Case(dtype="bfloat16", precision="input", **_SHAPE),
    "main_grad": Case(main_grad=True, dtype="bfloat16", **_SHAPE),
    "batch-invariant": Case(batch_invariant=True, twist="split", dtype="bfloat16", **_SHAPE),
    "checkpoint": Case(twist="checkpoint", dtype="bfloat16", **_SHAPE),
    "log-probabilities": Case(outputs=_OUTPUTS, packed=True, **_SHAPE),
    "log-probabilities of 16 bits": Case(
        outputs=_OUTPUTS, packed=True, dtype="bfloat16", trained="nothing", **_SHAPE
    ),
    "log-probabilities by entries": Case(
        outputs=("logprobs",), packed=True, bounded=True, **_SHAPE
    ),
    "log-probabilities with temperatures and a mask": Case(
        outputs=("logprobs", "masked_logprobs"),
        packed=True,
        row_temperature=True,
        sampling_mask=True,
        **_SHAPE,
    ),
}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS)
def test_call(case: Case) -> None:
    check(case)
