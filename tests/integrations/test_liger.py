"""Liger's loss modules and ours in their place give the same losses, gradients and metrics."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.integrations import liger
from tests.integrations.contract import Adapter, assert_alike, contract_of
from tests.support.tiny_models import tiny_model

theirs = pytest.importorskip("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOLoss
their_jsd = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDLoss
B, T, D, V = 3, 7, 8, 61
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "grpo": {"beta": 0.0, "epsilon_high": 0.3, "temperature": 0.7},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.02},
    "bnpo": {"delta": 1.3, "use_bias_correction_kl": True},
    "dr_grpo": {"max_completion_length": 9},
    "luspo": {"importance_sampling_level": "sequence", "beta": 0.0},
    "cispo": {"epsilon_high": 1.1},
    "sapo": {"sapo_temperature_pos": 2.0},
    "vespo": {"vespo_k_neg": 2.5},
}


def make_inputs(seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    hidden, weight, bias = normal(B, T, D), normal(V, D), normal(V)
    ids = torch.randint(0, V, (B, T), generator=g)
    logits = (hidden @ weight.T + bias).log_softmax(-1)
    own = logits.gather(-1, ids[..., None]).squeeze(-1)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[0, 4:] = mask[2, 6:] = 0
    return {
        "_input": hidden,
        "lin_weight": weight,
        "selected_token_ids": ids,
        "attention_mask": mask,
        "advantages": normal(B),
        "bias": bias,
        "ref_per_token_logps": own + 0.2 * normal(B, T),
        "old_per_token_logps": own + 0.2 * normal(B, T),
    }


def run(module: Any, inputs: dict[str, Any]) -> tuple[Any, Any, Any]:
    names = ("_input", "lin_weight", "bias")
    leaves = [inputs[name].clone().requires_grad_() for name in names]
    loss, metrics = module(**inputs | dict(zip(names, leaves, strict=True)))
    return loss.detach(), torch.autograd.grad(loss, leaves), tuple(metrics)


# what becomes of the inputs: a dtype that they are cast to, or other values; None: left out
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "integers": {
        "advantages": torch.tensor([2, -1, 0]), "vllm_is_ratio": torch.full((B, 1), 2),
        "selected_token_ids": torch.int32, "attention_mask": torch.int32,
    },
    "bool mask": {"attention_mask": torch.bool},
    "a sequence without tokens": {"attention_mask": torch.tensor([[1], [0], [1]]).expand(B, T)},
    "no tokens": {"attention_mask": torch.zeros(B, T), "vllm_is_ratio": torch.full((B,), 0.7)},
    **{
        f"a ratio per {of}": {
            "vllm_is_ratio": torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5,
            "num_items_in_batch": torch.tensor(31.0),
        }
        for of, shape in {"sequence": (B,), "token": (B, T)}.items()
    },
}  # fmt: skip
CHANGES["a ratio per token"]["vllm_is_ratio"][1, 2] = 0  # masked by the host
# of padding, which their vespo sums as well
CHANGES["a ratio per token"]["vllm_is_ratio"][make_inputs()["attention_mask"] == 0] = 1
ROUNDED = dict.fromkeys(("_input", "lin_weight", "bias"), torch.bfloat16)
# all ratios are 1: others may be clipped in theirs alone, which round logits
_BF16 = {"_input": torch.bfloat16, "advantages": torch.bfloat16, "old_per_token_logps": None}


def step(
    with_ours: bool, change: dict[str, Any] | None = None, exact: bool = True, **settings: Any
) -> Any:
    """Take the loss of inputs in their precision, or where ``exact`` of the same ones in fp32."""
    inputs = make_inputs()
    for name, value in (change or {}).items():
        inputs[name] = inputs[name].to(value) if isinstance(value, torch.dtype) else value
        if exact and value is torch.bfloat16:
            inputs[name] = inputs[name].float()
    module = liger.LigerFusedLinearGRPOLoss if with_ours else theirs
    loss, gradients, metrics = run(module(compiled=False, **settings), inputs)
    return loss, gradients, [float(value) for value in metrics]


OTHER = make_inputs(1)
NO_SCORES = {"ref_per_token_logps": None}
REFERENCE_INPUTS = {
    "scores": {},
    "its own inputs": {
        **NO_SCORES, "ref_input": OTHER["_input"], "ref_weight": OTHER["lin_weight"],
        "ref_bias": OTHER["bias"],
    },
    "none": NO_SCORES,
}  # fmt: skip
REFERENCES = {
    f"reference by {name}, used {used}, {more}": {
        "use_ref_model": used, "change": change, "temperature": 0.9, **more,
    }
    for more in ({}, {"use_bias_correction_kl": True})
    for name, change in REFERENCE_INPUTS.items()
    for used in (True, False)
    if name != "none" or not used  # an error, theirs and ours
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "loss_type: expected one of": {"loss_type": "ppo"},
    "delta: expected None for loss_type 'sapo', got": {"loss_type": "sapo", "delta": 2.0},
    "ref_logprobs: expected the reference's": {"change": {"ref_per_token_logps": None}},
    "mask: expected bool or 0 and 1": {"change": {"attention_mask": torch.full((B, T), 0.5)}},
    r"advantages: expected shape \(3,\)": {"change": {"advantages": torch.ones(B + 1)}},
    r"vllm_is_ratio: expected shape \(3,\)": {"change": {"vllm_is_ratio": torch.ones(T)}},
}


def instead_of(module: Any, model: Any) -> Any:
    """Return what a trainer of the model has in the place of a module of Liger's."""
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    trainer = SimpleNamespace(model=model, accelerator=accelerator, loss=module)
    liger.put_into(trainer, "loss", {}, "")
    return trainer.loss


def instead_of_theirs(family: str, adapter: bool = False) -> None:
    model = tiny_model(family)
    if adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    instead_of(theirs(), model)


def enabled_too_late(kind: Any) -> None:
    module = kind(compiled=False)
    try:
        liger.enable()
    finally:
        assert not liger.SWITCH.on and module


pytestmark = pytest.mark.filterwarnings("ignore:cispo uses")
test_inputs = contract_of(
    Adapter(
        package="liger_kernel",
        step=step,
        settings={
            f"{name}, {change}": {"loss_type": name, "change": CHANGES[change], **settings}
            for name, settings in CASES.items()
            for change in CHANGES
            if (name, change) != ("luspo", "a ratio per token")  # Liger's then counts padding
        }
        | REFERENCES,
        switch=liger.SWITCH,
        refused={message: partial(step, True, **more) for message, more in WRONG.items()}
        | {
            "model: expected logits without .* softcap 5.0": partial(instead_of_theirs, "gemma2"),
            "model: expected logits without .* scale 0.25": partial(instead_of_theirs, "cohere"),
            "model: expected lm_head without an adapter": partial(instead_of_theirs, "qwen2", True),
            "expected no LigerFusedLinearGRPOLoss of Liger yet": partial(enabled_too_late, theirs),
            "expected no LigerFusedLinearJSDLoss of Liger yet": partial(
                enabled_too_late, their_jsd
            ),
        },
    )
)
test_its_default_precision = contract_of(
    Adapter(
        package="liger_kernel",
        step=step,
        settings={
            f"{name}, {dtypes}": {"loss_type": name, "change": change, **settings}
            for name, settings in CASES.items()
            for dtypes, change in {"bf16": _BF16 | ROUNDED, "fp32 head": _BF16}.items()
        },
        default={"exact": False},
    )
)


@pytest.mark.parametrize("loss_type", ["grpo", "vespo"])
def test_beyond_theirs(loss_type: str) -> None:
    """Take flat hidden states, tokens without padding, and advantages per token."""
    inputs = make_inputs()
    module = liger.LigerFusedLinearGRPOLoss(loss_type=loss_type)
    inputs["vllm_is_ratio"] = torch.rand(B) + 0.5
    expected = run(module, inputs)
    kept = inputs["attention_mask"] == 1
    names = ("_input", "selected_token_ids", "ref_per_token_logps", "old_per_token_logps")
    packed = inputs | {name: inputs[name][kept] for name in names} | {"attention_mask": None}
    packed["cu_seqlens"] = torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0))
    flat = inputs | {"_input": inputs["_input"].reshape(-1, D)}
    per_token = inputs | {"advantages": inputs["advantages"][:, None].expand(B, T)}
    for other in (packed, flat, per_token):
        loss, gradients, metrics = run(module, other)
        assert_alike((loss, gradients[1:], metrics), (expected[0], expected[1][1:], expected[2]))


@pytest.mark.parametrize("loss_type", CASES)
def test_with_the_settings_of_theirs(loss_type: str) -> None:
    settings = {"loss_type": loss_type, "compiled": False, "beta": 0.2, **CASES[loss_type]}
    model = tiny_model("qwen2")
    made = instead_of(theirs(**settings), model)
    assert instead_of(made, model) is made
    plain = liger.LigerFusedLinearGRPOLoss(**settings)
    assert (made.config, made.use_ref_model) == (plain.config, plain.use_ref_model)


STUDENT = ("student_input", "student_weight", "student_bias")
BETAS = {"kl": 0, "reverse kl": 1, "jsd": 0.5, "near kl": 0.1}
JSD_INPUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "sequences": {"tokens": (3, 7)},
    "one token": {"tokens": (1,), "counted": 1.0},
    "no tokens": {"counted": 0.0},
    "another label is ignored": {"ignore_index": 7},
    "a padded teacher": {"teacher_rows": 64},
    "a padded teacher, no bias": {"teacher_rows": 64, "bias": False},
}
JSD_SETTINGS: dict[str, dict[str, Any]] = {
    "as trainers call it": {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0, "temperature": 0.7},
    "both": {"weight_hard_loss": 0.3, "temperature": 2.0},
    "parts": {"return_soft_hard_loss": True, "temperature": 0.6},
    "parts, soft": {"return_soft_hard_loss": True, "weight_hard_loss": 0.0},
}


def jsd_inputs(
    tokens: tuple[int, ...] = (21,),
    bias: bool = True,
    teacher_rows: int = 61,
    ignore_index: int = -100,
    counted: float = 0.7,
) -> dict[str, Any]:
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


def jsd_step(
    with_ours: bool,
    inputs: str = "plain",
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    **settings: Any,
) -> list[Tensor]:
    """Take the loss, its parts if it has them, and its gradients."""
    made = {
        name: value.to(dtype) if value is not None and value.is_floating_point() else value
        for name, value in jsd_inputs(**JSD_INPUTS[inputs]).items()
    }
    # the teacher's parameters need a gradient as well where nobody has frozen them
    made["teacher_weight"].requires_grad_()
    leaves = [made[name].requires_grad_() for name in STUDENT if made[name] is not None]
    if "ignore_index" in JSD_INPUTS[inputs]:
        settings["ignore_index"] = JSD_INPUTS[inputs]["ignore_index"]
    kind = liger.LigerFusedLinearJSDLoss if with_ours else their_jsd
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = kind(compiled=False, **settings)(**made)
    parts = result if isinstance(result, tuple) else (result,)
    return [x.detach() for x in (*parts, *torch.autograd.grad(3 * parts[0], leaves))]


def jsd_cases() -> dict[str, dict[str, Any]]:
    """Return all settings of the plain inputs; others meet each beta and each setting once."""
    cases = {}
    for (i, inputs), (j, kind) in itertools.product(enumerate(JSD_INPUTS), enumerate(BETAS)):
        for k, name in enumerate(JSD_SETTINGS):
            if inputs == "plain" or k == (i + j) % len(JSD_SETTINGS):
                more = {"beta": BETAS[kind], **JSD_SETTINGS[name]}
                cases[f"{inputs}, {kind}, {name}"] = {"inputs": inputs, **more}
    return cases


JSD = Adapter(
    package="liger_kernel",
    step=jsd_step,
    settings=jsd_cases(),
    default={"dtype": torch.bfloat16},
    fp32_only=[name for name in jsd_cases() if not name.startswith("plain")],
    refused={
        "beta: expected a number in": partial(jsd_step, True, beta=1.5),
        "temperature: expected a finite number > 0": partial(jsd_step, True, temperature=0.0),
        "teacher_head: expected the student's vocabulary": lambda: liger.LigerFusedLinearJSDLoss()(
            **jsd_inputs(teacher_rows=60)
        ),
    },
)
PLAIN = {name: settings for name, settings in JSD.settings.items() if name.startswith("plain")}
test_jsd = contract_of(JSD)
test_jsd_under_autocast = contract_of(
    replace(JSD, settings=PLAIN, default={"autocast": True}, refused={})
)
