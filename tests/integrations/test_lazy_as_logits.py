"""Whatever is done to logits that are not formed has the values, gradients and errors of logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels.integrations import lazy_logits
from tests.support.tiny_models import tiny_model

B, L = 3, 4
IDS = torch.arange(3, 3 + B * L).view(B, L)
MASK = IDS % 3 > 0
ROWS = torch.linspace(0.5, 2, B)[:, None, None]
BF16 = torch.bfloat16


def score(x: Tensor, ids: Tensor = IDS) -> Tensor:
    return x.log_softmax(-1).gather(-1, ids[..., None])


def changed(
    x: Tensor, of: Callable[[Tensor], Tensor], change: Callable[[Tensor], Any]
) -> tuple[Tensor, ...]:
    """Change in place what is made of logits; return the scores of that, and of the logits."""
    made = of(x)
    change(made)
    return score(x), made.sum()


def changed_first(x: Tensor, of: Callable[[Tensor], Tensor]) -> Tensor:
    made = of(x)
    x.mul_(0.5)
    return made.log_softmax(-1)[..., 7]


def read_first(x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        assert x.argmax(-1).shape == x.shape[:-1]
    return score(x)


def changed_without_gradient(x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(0.5)
    return score(x)


def cast_without_gradient(x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        same, whole = x.float(), x[:, :-1].contiguous()
    return score(same)[:, :-1] + score(whole, IDS[:, :-1])


def scaled_without_gradient(x: Tensor, t: Tensor) -> Tensor:
    with torch.no_grad():
        scaled = x * t
    return score(x) + score(scaled)


def changed_and_scored(x: Tensor, t: Tensor) -> Tensor:
    other = x[:, :-1]
    x.div_(0.5)
    if isinstance(x, lazy_logits.LazyLogits):
        return torch.cat([x.logprobs(IDS), x.entropy(), other.sum()[None, None].expand(B, 1)], 1)
    entropy = torch.distributions.Categorical(logits=x).entropy()
    return torch.cat([score(x).squeeze(-1), entropy, other.sum()[None, None].expand(B, 1)], 1)


def cross_entropy(x: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(x.flatten(0, 1), IDS.flatten(), **options)


# of logits (B, L, V), and of a number that is learned
CASES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "learned temperature": lambda x, t: score(x / t),
    "learned scale": lambda x, t: score(t.exp() * x * t),
    "learned scales of rows": lambda x, t: score(x * (ROWS * t)),
    "learned, in place": lambda x, t: score(x.div_(t)),
    "learned, in gather's place": lambda x, t: cross_entropy(x.div(t), reduction="sum"),
    "view changed": lambda x, t: changed(x, lambda x: x.view(-1, x.shape[-1]), lambda y: y.div_(2)),
    "rows changed": lambda x, t: changed(x, lambda x: x[:, :-1], lambda y: y.mul_(0.5)),
    "float changed": lambda x, t: changed(x, lambda x: x.float(), lambda y: y.div_(2)),
    "contiguous changed": lambda x, t: changed(x, lambda x: x.contiguous(), lambda y: y.mul_(3)),
    "detached changed": lambda x, t: changed(x, lambda x: x.detach(), lambda y: y.mul_(3)),
    "slice made contiguous": lambda x, t: changed(
        x, lambda x: x[:, :-1].contiguous(), lambda y: y.mul_(3)
    ),
    "copy changed": lambda x, t: changed(x, lambda x: x.clone(), lambda y: y.mul_(3)),
    "quotient changed": lambda x, t: changed(x, lambda x: x / 2, lambda y: y.mul_(3)),
    "half changed": lambda x, t: changed(x, lambda x: x.to(torch.float16), lambda y: y.mul_(3)),
    "copied scores changed": lambda x, t: changed(
        x.log_softmax(-1), lambda x: x.clone(), lambda y: y.mul_(3)
    ),
    "items set": lambda x, t: changed(
        x, lambda x: x[0], lambda y: y.index_fill_(1, torch.tensor([5]), 0.0)
    ),
    "view of what is changed": lambda x, t: changed_first(x, lambda x: x[:, 1:]),
    "copy of what is changed": lambda x, t: changed_first(x, lambda x: x / 2),
    "cast of what is changed": lambda x, t: changed_first(x, lambda x: x.to(torch.float64)),
    "changed and scored": changed_and_scored,
    "read without gradients": read_first,
    "changed without gradients": changed_without_gradient,
    "cast without gradients": cast_without_gradient,
    "scaled without gradients": scaled_without_gradient,
    "bf16 scale": lambda x, t: score(x * torch.tensor(0.7, dtype=BF16)),
    "bf16 scales of rows": lambda x, t: score(x * ROWS.to(BF16) / ROWS.square().to(BF16)),
    "fp64 scales of rows": lambda x, t: score(x * ROWS.double()),
    "scales of more rows": lambda x, t: score(x[:1] * ROWS),
    "scales of more dimensions": lambda x, t: score(x * torch.ones(1, 1, 1, 1), IDS[None]),
    "fp32 scales, bf16 in place": lambda x, t: x.to(BF16).div_(ROWS).float(),
    "negative scales of rows": lambda x, t: score(x * (ROWS - 1.2)),
    "zeros for rows": lambda x, t: score(x * ROWS.round()),
    "integers": lambda x, t: score(x / torch.tensor(2)),
    "copied by position": lambda x, t: changed(
        x, lambda x: x.to(torch.float32, False, True), lambda y: y.mul_(3)
    ),
    "as another tensor": lambda x, t: score(x.to(torch.zeros(1))),
    "copied by to": lambda x, t: changed(
        x, lambda x: x.to(torch.float32, copy=True), lambda y: y.mul_(3)
    ),
    "to integers": lambda x, t: x.to(torch.int64) + 0.0 * x,
    "to fp64": lambda x, t: score(x.to(torch.float64)),
    "log_softmax in fp64": lambda x, t: x.log_softmax(-1, torch.float64).gather(-1, IDS[..., None]),
    "other bits": lambda x, t: x.view(torch.int32) * 0 + x,
    "rounded quotient": lambda x, t: torch.div(x, 0.3, rounding_mode="floor") * x,
    "squeeze of several": lambda x, t: score(x[:, :1].squeeze((1,)), IDS[:, 0]),
    "reshape by name": lambda x, t: score(x.reshape(shape=(B * L, -1)), IDS.flatten()),
    "a NumPy mask": lambda x, t: score(x[MASK.numpy()], IDS[MASK]),
    "a list": lambda x, t: score(x[[0, 2]], IDS[[0, 2]]),
    "sum of both": lambda x, t: score(x + x / 2),
    "ignored": lambda x, t: cross_entropy(x, ignore_index=5, reduction="none"),
    "smooth": lambda x, t: cross_entropy(x, label_smoothing=0.1),
}  # fmt: skip


def outcome(model: Any, case: Callable[[Tensor, Tensor], Any]) -> tuple[Any, ...]:
    t = torch.tensor(0.8, requires_grad=True)
    found = case(model(input_ids=IDS).logits, t)
    found = found if isinstance(found, tuple) else (found,)
    found = tuple(x.formed() if isinstance(x, lazy_logits.LazyLogits) else x for x in found)
    total = sum((x.double() * torch.linspace(0.1, 1, x.numel()).view(x.shape)).sum() for x in found)
    leaves = [t, *(x for x in model.parameters() if x.requires_grad)]
    return found, torch.autograd.grad(total, leaves, allow_unused=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:LazyLogits")
def test_values_and_gradients(name: str) -> None:
    model = tiny_model("qwen2")
    expected = outcome(model, CASES[name])
    with lazy_logits.enabled(model):
        found = outcome(model, CASES[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Exp(torch.autograd.Function):
    """Takes tensors as they are, behind the back of torch's Python interface."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_a_function_of_autograd_takes_formed_ones() -> None:
    model = tiny_model("qwen2")
    with lazy_logits.enabled(model):
        logits = model(input_ids=IDS).logits
    with pytest.raises(RuntimeError, match="LazyLogits: expected real logits for an autograd.F"):
        Exp.apply(logits).sum().backward()
    Exp.apply(logits.formed()).sum().backward()
    assert model.lm_head.weight.grad is not None


ERRORS: dict[str, Callable[[Tensor], Any]] = {
    "an unknown reduction": lambda x: cross_entropy(x, reduction="summ"),
    "-100 beside another": lambda x: functional.cross_entropy(
        x[0], torch.tensor([5, -100, 4, 3]), ignore_index=5
    ),
    "-100 in gather": lambda x: score(x, IDS.masked_fill(MASK, -100)),
    "scales of other rows": lambda x: score(x * torch.ones(B + 1, 1, 1)),
    "a view of other sizes": lambda x: x.view(B, L + 1, x.shape[-1]),
    "to nothing": lambda x: x.to("nowhere"),
}


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.filterwarnings("ignore:LazyLogits")
def test_errors(name: str) -> None:
    model = tiny_model("qwen2")
    for on in (False, True):
        if on:
            lazy_logits.enable(model)
        with pytest.raises((ValueError, IndexError, RuntimeError)):
            ERRORS[name](model(input_ids=IDS).logits)
