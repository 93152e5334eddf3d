"""Liger's loss module of distillation and ours in its place: loss, parts and gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.integrations import liger
from tests.integrations.contract import Adapter, contract_of

theirs = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDLoss
STUDENT = ("student_input", "student_weight", "student_bias")


def make_inputs(
    tokens: tuple[int, ...] = (21,),
    bias: bool = True,
    teacher_rows: int = 61,
    ignore_index: int = -100,
    counted: float = 0.7,
) -> dict[str, Tensor | None]:
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:  # exact in 16 bits
        return torch.randn(*shape, generator=g).bfloat16().float()

    labels = torch.randint(0, 61, tokens, generator=g)
    ignored = torch.rand(tokens, generator=g) >= counted
    return {
        "student_input": normal(*tokens, 8),
        "student_weight": normal(61, 8) * 0.5,
        "student_bias": normal(61) if bias else None,
        "teacher_input": normal(*tokens, 12),
        "teacher_weight": normal(teacher_rows, 12) * 0.5,
        "teacher_bias": normal(teacher_rows) if bias else None,
        "true_labels": labels.masked_fill(ignored, ignore_index),
    }


def step(
    with_ours: bool,
    inputs: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **settings: Any,
) -> Any:
    """Take the loss, its parts if it has them, and its gradients."""
    made = {
        name: value.to(dtype) if value is not None and value.is_floating_point() else value
        for name, value in make_inputs(**(inputs or {})).items()
    }
    # the teacher's parameters need no less of a gradient, where nobody has frozen them
    leaves = [made[name].requires_grad_() for name in STUDENT if made[name] is not None]
    made["teacher_weight"].requires_grad_()
    module = liger.LigerFusedLinearJSDLoss if with_ours else theirs
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = module(compiled=False, **settings)(**made)
    parts = found if isinstance(found, tuple) else (found,)
    gradients = torch.autograd.grad(3 * parts[0], leaves)
    return [x.detach() for x in (*parts, *gradients)]


BETAS = {"kl": 0, "reverse kl": 1, "jsd": 0.5, "near kl": 0.1}
INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "sequences": {"tokens": (3, 7)},
    "one token": {"tokens": (1,), "counted": 1.0},
    "no tokens": {"counted": 0.0},
    "another label is ignored": {"ignore_index": 7},
    "a padded teacher": {"teacher_rows": 64},
    "a padded teacher, no bias": {"teacher_rows": 64, "bias": False},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "as trainers call it": {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "temperature": 0.7},
    "both": {"weight_hard_loss": 0.3, "temperature": 2.0},
    "parts": {"return_soft_hard_loss": True, "temperature": 0.6},
    "parts, soft": {"return_soft_hard_loss": True, "weight_hard_loss": 0.0},
}


def case(inputs: str, beta: float, settings: dict[str, Any]) -> dict[str, Any]:
    ignored = {"ignore_index": 7} if "ignored" in inputs else {}
    return {"inputs": INPUTS[inputs], "beta": beta, **ignored, **settings}


def enabled_too_late() -> None:
    module = theirs(compiled=False)
    try:
        liger.enable()
    finally:
        assert not liger.SWITCH.on and module


test_inputs = contract_of(
    Adapter(
        package="liger_kernel",
        step=step,
        settings={
            f"{kind}, {inputs}, {name}": case(inputs, beta, settings)
            for kind, beta in BETAS.items()
            for inputs in INPUTS
            for name, settings in SETTINGS.items()
        },
        switch=liger.SWITCH,
        refused={
            "beta: expected a number in": partial(step, True, beta=1.5),
            "temperature: expected a finite number > 0": partial(step, True, temperature=0.0),
            "teacher_head: expected the student's vocabulary": partial(
                step, True, {"teacher_rows": 60}
            ),
            "expected no LigerFusedLinearJSDLoss of Liger's yet": enabled_too_late,
        },
    )
)
PRECISIONS = {"bf16": {"dtype": torch.bfloat16}, "autocast": {"autocast": True}}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", BETAS)
@pytest.mark.parametrize("settings", SETTINGS)
def test_in_16_bits(settings: str, kind: str, precision: str) -> None:
    """Against theirs in fp32 no number is further off than their own in this precision."""
    given = case("plain", BETAS[kind], SETTINGS[settings])
    exact = step(False, **given)
    found, others = (step(ours, **given, **PRECISIONS[precision]) for ours in (True, False))
    for own, other, true in zip(found, others, exact, strict=True):
        error, bound = ((x.double() - true).norm() / true.norm() for x in (own, other))
        assert error <= max(2 * bound, 2.0**-7)
