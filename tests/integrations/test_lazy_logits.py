"""Logits that are not formed give what real ones do: values, gradients, errors, in any use."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.integrations import lazy_logits
from grpo_kernels.integrations.lazy_logits import LazyLogits
from tests.integrations.contract import unformed
from tests.support.tiny_models import tiny_model

B, L = 3, 4
IDS = torch.arange(3, 3 + B * L).view(B, L)
MASK = IDS % 3 > 0
ROWS = torch.linspace(0.5, 2, B)[:, None, None]
BF16 = torch.bfloat16
Case = Callable[[Tensor, Tensor], Any]  # of logits (B, L, V), and of a number that is learned


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


def changed_and_scored(x: Tensor, t: Tensor) -> Tensor:
    other = x[:, :-1]
    x.div_(0.5)
    if isinstance(x, lazy_logits.LazyLogits):
        return torch.cat([x.logprobs(IDS), x.entropy(), other.sum()[None, None].expand(B, 1)], 1)
    entropy = torch.distributions.Categorical(logits=x).entropy()
    return torch.cat([score(x).squeeze(-1), entropy, other.sum()[None, None].expand(B, 1)], 1)


def cross_entropy(x: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(x.flatten(0, 1), IDS.flatten(), **options)


def valid_rows(x: Tensor, t: Tensor) -> Tensor:
    return functional.log_softmax(x[:, :-1][MASK[:, 1:]], -1).gather(
        1, IDS[:, 1:][MASK[:, 1:], None]
    )


def packed(x: Tensor, t: Tensor) -> Tensor:
    flat = x.reshape(1, B * L, -1).squeeze(0)
    return score(flat[:-1], IDS.flatten()[1:]).view(-1)


def shifted_loss(x: Tensor, t: Tensor) -> Tensor:
    rows = x[:, :-1].float().contiguous().view(-1, x.shape[-1])
    return functional.cross_entropy(rows, IDS[:, 1:].masked_fill(~MASK[:, 1:], -100).flatten())


# nobody forms them, whatever the family's logits are
UNFORMED: dict[str, Case] = {
    "cross entropy": shifted_loss,
    "valid rows": valid_rows,
    "packed": packed,
}
# some form them
EITHER: dict[str, Case] = {
    "learned scales of rows": lambda x, t: score(x * (ROWS * t)),
    "learned, in place": lambda x, t: score(x.div_(t)),
    "learned, in gather's place": lambda x, t: cross_entropy(x.div(t), reduction="sum"),
    "view changed": lambda x, t: changed(x, lambda x: x.view(-1, x.shape[-1]), lambda y: y.div_(2)),
    "float changed": lambda x, t: changed(x, lambda x: x.float(), lambda y: y.div_(2)),
    "slice made contiguous": lambda x, t: changed(
        x, lambda x: x[:, :-1].contiguous(), lambda y: y.mul_(3)
    ),
    "copy of what is changed": lambda x, t: changed_first(x, lambda x: x / 2),
    "changed and scored": changed_and_scored,
    "read without gradients": read_first,
    "changed without gradients": changed_without_gradient,
    "bf16 scales of rows": lambda x, t: score(x * ROWS.to(BF16) / ROWS.square().to(BF16)),
    "fp64 scales of rows": lambda x, t: score(x * ROWS.double()),
    "scales of more dimensions": lambda x, t: score(x * torch.ones(1, 1, 1, 1), IDS[None]),
    "negative scales of rows": lambda x, t: score(x * (ROWS - 1.2)),
    "copied by to": lambda x, t: changed(
        x, lambda x: x.to(torch.float32, copy=True), lambda y: y.mul_(3)
    ),
    "to integers": lambda x, t: x.to(torch.int64) + 0.0 * x,
    "to fp64": lambda x, t: score(x.to(torch.float64)),
    "log_softmax in fp64": lambda x, t: x.log_softmax(-1, torch.float64).gather(-1, IDS[..., None]),
    "squeeze of several": lambda x, t: score(x[:, :1].squeeze((1,)), IDS[:, 0]),
    "a NumPy mask": lambda x, t: score(x[MASK.numpy()], IDS[MASK]),
    "ignored": lambda x, t: cross_entropy(x, ignore_index=5, reduction="none"),
    "smooth": lambda x, t: cross_entropy(x, label_smoothing=0.1),
}  # fmt: skip
# they are formed, which is said
FORMED: dict[str, Case] = {
    "softmax": lambda x, t: x.softmax(-1),
    "one score": lambda x, t: x[..., 5],
    "transpose": lambda x, t: x.transpose(1, 2),
    "argmax": lambda x, t: x.argmax(-1),
    "over rows": lambda x, t: x.log_softmax(1),
    "flat": lambda x, t: x.view(-1),
}


def outcome(model: Any, case: Case) -> tuple[Any, ...]:
    """Return the results and the gradients of all that is learned."""
    t = torch.tensor(0.8, requires_grad=True)
    found = case(model(input_ids=IDS).logits, t)
    found = found if isinstance(found, tuple) else (found,)
    found = tuple(x.formed() if isinstance(x, LazyLogits) else x for x in found)
    total = sum((x.double() * torch.linspace(0.1, 1, x.numel()).view(x.shape)).sum() for x in found)
    if not total.requires_grad:
        return found, ()
    leaves = [t, *(x for x in model.parameters() if x.requires_grad)]
    return found, torch.autograd.grad(total, leaves, allow_unused=True)


@contextmanager
def says_nothing() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LazyLogits")
        yield


KINDS: dict[str, tuple[dict[str, Case], Callable[[], Any], tuple[str, ...]]] = {
    "unformed": (UNFORMED, unformed, ("qwen2", "gemma2", "cohere", "granite")),
    "either": (EITHER, says_nothing, ("qwen2",)),
    "formed": (
        FORMED, lambda: pytest.warns(UserWarning, match="LazyLogits: .* needs the"), ("gemma2",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "family"),
    [(kind, name, family) for kind, (cases, _, families) in KINDS.items()
     for name in cases for family in families],
)  # fmt: skip
def test_values_and_gradients(kind: str, name: str, family: str) -> None:
    model, (cases, context, _) = tiny_model(family), KINDS[kind]
    expected = outcome(model, cases[name])
    with lazy_logits.enabled(model), context():
        found = outcome(model, cases[name])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


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


def test_generation_is_as_before() -> None:
    model = tiny_model("qwen2").eval()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(IDS, **options)
    with lazy_logits.enabled(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(IDS, **options), expected)


def test_on_and_off() -> None:
    model = tiny_model("qwen2")
    before, attributes = model(input_ids=IDS).logits, vars(model.lm_head).keys() | set()
    lazy_logits.enable(model)
    lazy_logits.enable(model)
    with lazy_logits.enabled(model):
        pass
    logits = model(input_ids=IDS).logits
    assert isinstance(logits, LazyLogits) and isinstance(logits, Tensor)
    assert logits.shape == before.shape and logits.dtype == before.dtype
    copied = copy.deepcopy(model)
    lazy_logits.disable(model)
    lazy_logits.disable(model)
    assert torch.equal(model(input_ids=IDS).logits, before)
    logits = copied(input_ids=IDS).logits
    assert isinstance(logits, LazyLogits) and logits.recipe.layer is copied.lm_head
    assert type(model.lm_head) is torch.nn.Linear and vars(model.lm_head).keys() == attributes
    fused = FusedHead(model.lm_head, softcap=2.0)
    with lazy_logits.enabled(model):
        pass
    assert type(model.lm_head) is type(fused) and fused._transform.softcap == 2.0
    with pytest.raises(ValueError, match="model: expected one with output embeddings, got"):
        lazy_logits.enable(model.model)


def test_lora_on_the_head() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    expected = score(model(input_ids=IDS).logits)
    with unformed(), lazy_logits.enabled(model.get_base_model()):
        found = score(model(input_ids=IDS).logits)
    torch.testing.assert_close(found, expected)


@unformed()
def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loop and the trainer of docs/integrations.md, which form no logits."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    loop, trainer = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "lazy_logits" in block
    )
    model = tiny_model("qwen2")
    before = model.lm_head.weight.detach().clone()
    batch = {"input_ids": IDS, "old_logprobs": -torch.rand(B, L - 1), "advantages": torch.ones(B)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(loop, {"model": model, "batches": [batch], "temperature": 0.7, "optimizer": optimizer})
    assert not torch.equal(model.lm_head.weight, before)
    before = model.lm_head.weight.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    exec(trainer.replace("max_steps=2", 'max_steps=2, use_cpu=True, report_to="none"'),
         {"model": model, "dataset": rows})  # fmt: skip
    assert not torch.equal(model.lm_head.weight, before)
