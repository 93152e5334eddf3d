"""Logits that are not formed give the log-probabilities, losses and gradients of those that are."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels.fused_head import FusedHead
from grpo_kernels.integrations import lazy_logits
from grpo_kernels.integrations.lazy_logits import LazyLogits
from tests.support.tiny_models import tiny_model

B, L = 3, 6


def ids_of(model: Any) -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(3, model.config.get_text_config().vocab_size, (B, L), generator=g)


def by_gather(logits: Tensor, ids: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def by_cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    target = ids[:, 1:].masked_fill(ids[:, 1:] % 3 == 0, -100)
    rows = logits[:, :-1].float().contiguous().view(-1, logits.shape[-1])
    return functional.cross_entropy(rows, target.flatten())


def with_temperatures(logits: Tensor, ids: Tensor) -> Tensor:
    logits = logits[:, :-1] / torch.linspace(0.5, 2, B)[:, None, None]
    logits.div_(0.7)
    return torch.log_softmax(logits * 1.3, dim=-1).gather(-1, ids[:, 1:].unsqueeze(-1))


def of_valid_rows(logits: Tensor, ids: Tensor) -> Tensor:
    valid = ids[:, 1:] % 3 > 0
    return functional.log_softmax(logits[:, :-1][valid], -1).gather(1, ids[:, 1:][valid][:, None])


def row_by_row(logits: Tensor, ids: Tensor) -> Tensor:
    each = [
        row[..., :-1, :].float().log_softmax(-1).gather(-1, own[1:, None])
        for row, own in zip(logits, ids, strict=True)
    ]
    return torch.cat(each)


def packed(logits: Tensor, ids: Tensor) -> Tensor:
    flat = logits.reshape(1, B * L, -1).squeeze(0)
    logp = flat[:-1].log_softmax(-1)
    return logp.gather(-1, ids.flatten()[1:].unsqueeze(-1)).view(-1)


def sums(logits: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum")


SCORERS = [
    by_gather, by_cross_entropy, with_temperatures, of_valid_rows, row_by_row, packed, sums,
]  # fmt: skip


@pytest.mark.parametrize("score", SCORERS)
@pytest.mark.parametrize("family", ["qwen2", "gemma2", "cohere", "granite"])
def test_scores_are_those_of_real_logits(
    score: Callable[[Tensor, Tensor], Tensor], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    ids = ids_of(model)
    parameters = [x for x in model.parameters() if x.requires_grad]

    def run() -> tuple[Any, ...]:
        found = score(model(input_ids=ids).logits, ids)
        upstream = torch.linspace(-1, 1, found.numel()).view(found.shape) + 0.1
        return found.detach(), torch.autograd.grad((found * upstream).sum(), parameters)

    expected = run()
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)  # nobody forms them
    with lazy_logits.enabled(model):
        found = run()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_loss_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen2")
    ids = ids_of(model)
    expected = model(input_ids=ids, labels=ids).loss
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)
    with lazy_logits.enabled(model):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)


def test_what_it_says_of_itself() -> None:
    model = tiny_model("qwen2")
    with lazy_logits.enabled(model):
        logits = model(input_ids=ids_of(model)).logits
    assert isinstance(logits, LazyLogits) and isinstance(logits, Tensor)
    vocabulary = model.config.vocab_size
    assert logits.shape == (B, L, vocabulary) and logits.size(-1) == vocabulary and len(logits) == B
    assert logits.dtype == torch.float32 and logits.bfloat16().dtype == torch.bfloat16
    assert logits.device.type == "cpu" and logits.dim() == logits.ndim == 3
    assert logits.to("cpu", torch.float16).float().dtype == torch.float32
    assert repr(logits[0]) == f"LazyLogits(shape=({L}, {vocabulary}), dtype=torch.float32)"
    detached = logits.detach().log_softmax(-1).gather(-1, ids_of(model)[..., None])
    assert not detached.requires_grad


def test_logprobs_and_entropy() -> None:
    model = tiny_model("qwen2")
    ids = ids_of(model)
    real = model(input_ids=ids).logits.log_softmax(-1)
    with lazy_logits.enabled(model):
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits.logprobs(ids), real.gather(-1, ids[..., None])[..., 0])
    torch.testing.assert_close(logits.entropy(), -(real.exp() * real).sum(-1))


OTHERS: list[Callable[[Tensor], Any]] = [
    lambda x: x.softmax(-1),
    lambda x: x[..., 5],
    lambda x: x[:, :, :7].exp(),
    lambda x: x.transpose(1, 2),
    lambda x: x.argmax(-1),
    lambda x: x + 1,
    lambda x: x / torch.ones(x.shape[-1]),
    lambda x: x * -1.0,
    lambda x: (x / torch.tensor([[[0.5]], [[1.0]], [[2.0]]])).tanh(),
    lambda x: x.log_softmax(1),
    lambda x: x.logsumexp(-1),
    lambda x: torch.stack([x, x]),
    lambda x: x.log_softmax(-1).topk(3).values,
    lambda x: x.view(-1),
    lambda x: functional.cross_entropy(x[0], torch.ones(L).long(), label_smoothing=0.1),
    lambda x: x.clone().masked_fill_(x > 0, 0.0),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_anything_else_forms_them_and_says_so(number: int) -> None:
    model, function = tiny_model("gemma2"), OTHERS[number]
    ids = ids_of(model)
    expected = function(model(input_ids=ids).logits)
    with lazy_logits.enabled(model), pytest.warns(UserWarning, match="LazyLogits: .* needs the"):
        found = function(model(input_ids=ids).logits)
    assert not isinstance(found, LazyLogits)
    torch.testing.assert_close(found, expected)


def test_generation_is_as_before() -> None:
    model = tiny_model("qwen2").eval()
    ids = ids_of(model)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    with lazy_logits.enabled(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(ids, **options), expected)


def test_on_and_off() -> None:
    model = tiny_model("qwen2")
    ids = ids_of(model)
    before, attributes = model(input_ids=ids).logits, vars(model.lm_head).keys() | set()
    lazy_logits.enable(model)
    lazy_logits.enable(model)
    with lazy_logits.enabled(model):
        pass
    assert isinstance(model(input_ids=ids).logits, LazyLogits)
    copied = copy.deepcopy(model)
    lazy_logits.disable(model)
    lazy_logits.disable(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    logits = copied(input_ids=ids).logits
    assert isinstance(logits, LazyLogits) and logits.recipe.layer is copied.lm_head
    assert type(model.lm_head) is torch.nn.Linear and vars(model.lm_head).keys() == attributes
    fused = FusedHead(model.lm_head, softcap=2.0)
    with lazy_logits.enabled(model):
        pass
    assert type(model.lm_head) is type(fused) and fused._transform.softcap == 2.0
    with pytest.raises(ValueError, match="model: expected one with output embeddings, got"):
        lazy_logits.enable(model.model)


def test_lora_on_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    ids = ids_of(model)
    expected = by_gather(model(input_ids=ids).logits, ids)
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)
    with lazy_logits.enabled(model.get_base_model()):
        found = by_gather(model(input_ids=ids).logits, ids)
    torch.testing.assert_close(found, expected)


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the loop and the trainer of docs/integrations.md, which form no logits."""
    monkeypatch.setattr(lazy_logits.Recipe, "logits", None)
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    loop, trainer = (
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "lazy_logits" in block
    )
    model = tiny_model("qwen2")
    ids = ids_of(model)
    before = model.lm_head.weight.detach().clone()
    batch = {"input_ids": ids, "old_logprobs": -torch.rand(B, L - 1), "advantages": torch.ones(B)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exec(loop, {"model": model, "batches": [batch], "temperature": 0.7, "optimizer": optimizer})
    assert not torch.equal(model.lm_head.weight, before)
    before = model.lm_head.weight.detach().clone()
    rows = [{"input_ids": row, "labels": row} for row in ids]
    exec(trainer.replace("max_steps=2", 'max_steps=2, use_cpu=True, report_to="none"'),
         {"model": model, "dataset": rows})  # fmt: skip
    assert not torch.equal(model.lm_head.weight, before)
