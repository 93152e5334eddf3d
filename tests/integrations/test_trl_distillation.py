"""TRL's divergence of distillation and ours in its place: values, and gradients, of many cases."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.integrations import trl_head as ours
from grpo_kernels.testing import assert_as_exact_as

module = pytest.importorskip("trl.trainer.distillation_trainer")
theirs = module._chunked_divergence_loss
STUDENT = ("student_hidden_states", "student_lm_head_weight", "student_lm_head_bias")
# of fp32; of bf16 where ours round a gradient that theirs has in fp32: that of a bias, and where
# weights or hidden states are in fp32
FP32, BF16 = 2e-6, 2.0**-7


def generated(seed: int) -> dict[str, Any]:
    """Make arguments of any kind that the trainer may give, in fp64."""
    choose, g = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:  # exact in 16 bits
        return torch.randn(*shape, generator=g).bfloat16().double()

    rows, columns = choose.choice([1, 3]), choose.choice([1, 6, 17])
    vocabulary = choose.choice([5, 61, 300])
    arguments: dict[str, Any] = {
        "beta": choose.choice([0, 0.0, 1, 1.0, 0.1, 0.5, 0.9]),
        "temperature": choose.choice([1.0, 0.6, 2.0]),
        "completion_mask": torch.rand(rows, columns, generator=g) < choose.choice([0.7, 1.0]),
        "num_items_in_batch": choose.choice([None, 7, torch.tensor(11.0), torch.tensor(13)]),
    }
    for who in ("student", "teacher"):
        width = choose.choice([8, 20])
        arguments |= {
            f"{who}_hidden_states": normal(rows, columns, width),
            f"{who}_lm_head_weight": normal(vocabulary, width) * 0.5,
            f"{who}_lm_head_bias": choose.choice([None, normal(vocabulary)]),
            f"{who}_logit_scale": choose.choice([1.0, 0.5]),
            f"{who}_final_logit_softcapping": choose.choice([None, 3.0]),
        }
    dtype = choose.choice([torch.bool, torch.int64, torch.float32])
    return arguments | {"completion_mask": arguments["completion_mask"].to(dtype)}


def exactly(
    student: Tensor, teacher: Tensor, completion_mask: Tensor, beta: float, items: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what they compute of log-probabilities in fp64."""
    s, t, kept = student.exp(), teacher.exp(), completion_mask != 0
    if beta in (0, 1):
        each = t * (teacher - student) if beta == 0 else s * (student - teacher)
    else:
        middle = ((1 - beta) * s + beta * t).log()
        each = beta * t * (teacher - middle) + (1 - beta) * s * (student - middle)
    entropy, count = -(s * student).sum(-1), kept.sum()
    items = count.clamp(min=1) if items is None else items
    return each.sum(-1)[kept].sum() / items, entropy[kept].sum(), count


def oracle(**given: Any) -> tuple[Tensor, Tensor, Tensor]:
    logp = []
    for who in ("student", "teacher"):
        logits = given[f"{who}_hidden_states"] @ given[f"{who}_lm_head_weight"].T
        if (bias := given[f"{who}_lm_head_bias"]) is not None:
            logits = logits + bias
        logits = logits * given[f"{who}_logit_scale"]
        if (cap := given[f"{who}_final_logit_softcapping"]) is not None:
            logits = cap * (logits / cap).tanh()
        logp.append((logits / given["temperature"]).log_softmax(-1))
    items = given["num_items_in_batch"]
    return exactly(*logp, given["completion_mask"], given["beta"], items)


def results(
    function: Any, arguments: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Return by name what a function gives for arguments in some dtypes, and the gradients."""
    given = dict(arguments)
    for name, value in arguments.items():
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            kind = name.split("_")[1]  # hidden or lm
            given[name] = value.to(dtypes[kind]).requires_grad_(kind == "lm" or name in STUDENT)
    leaves = {name: given[name] for name in STUDENT if given[name] is not None}
    loss, entropy, count = function(**given)
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves.values()]
    found = {"loss": loss, "entropy": entropy, "count": count}
    found |= {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().double() for name, x in found.items()}


DTYPES = {
    "fp32": ({"hidden": torch.float32, "lm": torch.float32}, FP32),
    "bf16": ({"hidden": torch.bfloat16, "lm": torch.bfloat16}, FP32),
    "fp32 weights": ({"hidden": torch.bfloat16, "lm": torch.float32}, BF16),
    "autocast": ({"hidden": torch.float32, "lm": torch.float32}, BF16),
}


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("seed", range(24))
def test_as_exact_as_theirs(seed: int, dtypes: str) -> None:
    (kinds, floor), arguments = DTYPES[dtypes], generated(seed)
    exact = results(oracle, arguments, dict.fromkeys(kinds, torch.float64))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtypes == "autocast"):
        found, others = (
            results(function, arguments, kinds)
            for function in (ours.chunked_divergence_loss, theirs)
        )
    assert found["count"] == others["count"] == exact["count"]
    for name, value in found.items():
        of_bias = BF16 if "bias" in name and dtypes != "fp32" else FP32
        bound = max(floor, of_bias) if name.startswith("d") else FP32
        assert_as_exact_as(value, others[name], exact[name], bound, name)


def test_no_tokens() -> None:
    """The loss is 0, with gradients of 0, whatever it is divided by."""
    arguments = generated(1)
    arguments["completion_mask"] = torch.zeros_like(arguments["completion_mask"])
    for items in (None, torch.tensor(3.0)):
        arguments["num_items_in_batch"] = items
        found = results(ours.chunked_divergence_loss, arguments, DTYPES["fp32"][0])
        assert not any(x.any() for x in found.values())


def test_it_is_put_in_place() -> None:
    with ours.enabled():
        assert module._chunked_divergence_loss is ours.chunked_divergence_loss
    assert module._chunked_divergence_loss is theirs


def test_an_adapter_on_the_head_stays_refused() -> None:
    """Their trainer does: the function is handed the weight alone."""
    peft = pytest.importorskip("peft")
    from tests.integrations import trl_training as training

    lora = peft.LoraConfig(target_modules=["lm_head"])
    with ours.enabled(), pytest.raises(ValueError, match="adapter to `lm_head` is not supported"):
        training.build(training.distillation, peft=lora)
