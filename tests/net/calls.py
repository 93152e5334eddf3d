"""Calls that launch every Triton kernel: held to the oracle, and run as machine code."""

from __future__ import annotations

from typing import Any

from tests.net import oracle
from tests.net.cases import DIVERGENCES, LOSSES, Case

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
_HALF = {"dtype": "bfloat16"} | _SHAPE
_DTYPES = ("bfloat16", "float32", "float16")
_LONG = {"lengths": (5, 20, 0, 1), "vocab": 11, "settings": {"beta": 0.05}}


def _of_loss(place: int, name: str) -> Case:
    return Case(
        loss_type=name,
        settings=_TERMS | _NEEDED.get(name, {}),
        rollout="given" if name in oracle.GATED else "absent",
        dtype=_DTYPES[place % 3],
        schedule=("one_pass", "two_pass")[place % 2],
        **_SHAPE,
    )


CALLS = {
    **{name: _of_loss(place, name) for place, name in enumerate(LOSSES)},
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
    "adapter": Case(lora=3, trained="lora", **_HALF),
    "adapter of fp32 and its head, two passes": Case(
        lora=3, bias=True, factors="float32", schedule="two_pass", **_HALF
    ),
    "huge factors of an adapter": Case(lora=3, factor_size=1e4, factors="float32", **_HALF),
    "rollout weights": Case(rollout="weights", **_SHAPE),
    "several tiles of whole sequences": Case(loss_type="gspo", tile_rows=8, **_SHAPE | _LONG),
    "a tile that is longer than the sequences": Case(
        loss_type="vespo", tile_rows=32, schedule="one_pass", **_SHAPE | _LONG
    ),
    "bounded": Case(bounded=True, dtype="bfloat16", **_SHAPE),
    "bounded, the head's gradient as well": Case(bounded=True, seed=1, **_HALF),
    "sampling mask": Case(sampling_mask=True, **_SHAPE),
    "sampling mask, two passes": Case(sampling_mask=True, schedule="two_pass", **_HALF),
    "fp16": Case(dtype="float16", **_SHAPE),
    "rounded logits": Case(dtype="bfloat16", precision="input", **_SHAPE),
    "main_grad": Case(main_grad=True, dtype="bfloat16", **_SHAPE),
    "main_grad of fp16, two passes": Case(
        main_grad=True, schedule="two_pass", dtype="float16", **_SHAPE
    ),
    "batch-invariant": Case(batch_invariant=True, twist="split", dtype="bfloat16", **_SHAPE),
    "checkpoint": Case(twist="checkpoint", dtype="bfloat16", **_SHAPE),
    "log-probabilities": Case(outputs=_OUTPUTS, packed=True, **_SHAPE),
    "log-probabilities of 16 bits": Case(
        outputs=_OUTPUTS, packed=True, dtype="bfloat16", trained="nothing", **_SHAPE
    ),
    "log-probabilities of capped logits that are rounded to fp16": Case(
        outputs=_OUTPUTS,
        packed=True,
        dtype="float16",
        precision="input",
        softcap=3.0,
        logit_scale=0.5,
        bias=True,
        **_SHAPE,
    ),
    "log-probabilities whose dlogits are kept": Case(
        outputs=("logprobs",), packed=True, activation_bytes=1 << 20, **_HALF
    ),
    "batch-invariant log-probabilities": Case(
        outputs=(*_OUTPUTS, "topk_indices", "topk_logprobs"),
        packed=True,
        batch_invariant=True,
        twist="split",
        tile_rows=16,
        row_temperature=True,
        **_HALF | {"lengths": (37,)},
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

for _kind in DIVERGENCES:
    CALLS |= {
        f"{_kind}": Case(divergence=_kind, softcap=5.0, packed=True, **_SHAPE),
        f"{_kind} of first ids": Case(divergence=_kind, top_k=4, lora=2, packed=True, **_HALF),
        f"{_kind} of absent ids": Case(
            divergence=_kind, logits="minus_inf", bias=True, packed=True, tile_rows=4, **_HALF
        ),
    }
