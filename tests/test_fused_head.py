"""FusedHead: the same layer, which called with targets forms no logits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import FusedHead, Head, Transform, linear_divergence, linear_logprobs

VOCAB, WIDTH = 23, 8


def make_layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, VOCAB)


def rows() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, 5, WIDTH, requires_grad=True), torch.randint(0, VOCAB, (2, 5))


def expected(layer: nn.Linear, **options: Any) -> Tensor:
    hidden, target = rows()
    out = linear_logprobs(hidden, layer.weight, target, bias=layer.bias, **options)
    assert out.logprobs is not None
    return out.logprobs


def test_it_is_the_layer_itself() -> None:
    layer, hook = make_layer(), []
    layer.register_forward_hook(lambda *_: hook.append("fired"))
    names, (hidden, target) = list(layer.state_dict()), rows()
    logits = layer(hidden)
    head = FusedHead(FusedHead(layer))
    assert head is layer and isinstance(head, nn.Linear) and list(head.state_dict()) == names
    assert type(head).__name__ == "FusedLinear"
    assert torch.equal(head(hidden), logits)
    out = head(hidden, target, outputs=("logprobs", "entropy"))
    assert torch.equal(out.logprobs, expected(layer)) and out.lse is None
    torch.testing.assert_close(
        out.entropy, torch.distributions.Categorical(logits=logits).entropy()
    )
    assert len(hook) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_is_one_too(copied: Any) -> None:
    head, (hidden, target) = FusedHead(make_layer(), logit_scale=0.5), rows()
    other = copied(head)
    assert type(other) is type(head) and other.weight is not head.weight
    before = head(hidden, target).logprobs
    with torch.no_grad():
        head.weight.zero_()
    assert torch.equal(other(hidden, target).logprobs, before)


@pytest.mark.parametrize("first", ["hooks", "head"])
def test_an_offloaded_head(first: str) -> None:
    """accelerate's hooks bring the weight for the time of a call; else it is on no device."""
    accelerate = pytest.importorskip("accelerate")
    layer, (hidden, target) = make_layer(), rows()
    right, logits = expected(layer), layer(hidden)
    model = nn.Sequential(layer)
    if first == "head":
        FusedHead(layer)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert layer.weight.device.type == "meta"
    head = FusedHead(layer)
    with torch.no_grad():
        assert torch.equal(head(hidden, target).logprobs, right)
        assert torch.equal(head(hidden), logits)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(head(hidden, target).logprobs, right)


@pytest.mark.parametrize("of", ["logits", "topk"])
def test_divergence(of: str) -> None:
    """From a teacher's head or first ids, by a call of the student's, which hooks see."""
    layer, hook, (hidden, ids) = make_layer(), [], rows()
    head = FusedHead(layer, logit_scale=0.5)
    head.register_forward_hook(lambda *_: hook.append("fired"))
    own = Head(layer.weight, layer.bias, Transform(0.5))
    given: dict[str, Any] = {"teacher_topk": (-1.5 - ids[..., None], ids[..., None])}
    if of == "logits":
        weight, bias = torch.randn(VOCAB, 5), torch.randn(VOCAB)
        teacher = Head(weight, bias, Transform(softcap=3.0))
        given = {"teacher_hidden": torch.randn(2, 5, 5), "teacher_head": teacher}
    options = {"kind": "jsd", "beta": 0.3, "temperature": 0.7, **given}
    found, right = head.divergence(hidden, **options), linear_divergence(hidden, own, **options)
    assert hook == ["fired"] and all(map(torch.equal, found, right))
    inputs = hidden, layer.weight, layer.bias
    assert all(map(torch.equal, *(torch.autograd.grad(x.loss, inputs) for x in (found, right))))


def patched() -> nn.Linear:
    layer = make_layer()
    layer.forward = lambda hidden: hidden
    return layer


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: FusedHead(make_layer().weight), "layer: expected an nn.Module, got Parameter"),
        (lambda: FusedHead(patched()), "with a patched forward"),
        (lambda: FusedHead(nn.ReLU())(*rows()), "expected a plain linear layer, got FusedReLU"),
    ],
)
def test_what_is_no_layer_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("size", [0, VOCAB * WIDTH, None])
def test_a_weight_that_fsdp_keeps_is_refused(size: int | None) -> None:
    """A shard that nobody gathered, or memory that was freed."""
    head, message = FusedHead(make_layer()), r"FSDP has freed.*FusedHead"
    if size is None:
        head.weight.untyped_storage().resize_(0)
    else:
        head.weight, message = nn.Parameter(torch.zeros(size)), r"FSDP has sharded.*FusedHead"
    with pytest.raises(ValueError, match=message):
        head(*rows())
    with pytest.raises(ValueError, match=message):
        linear_logprobs(rows()[0], head.weight, rows()[1])


def test_rows_of_padding_are_left_out() -> None:
    layer, (hidden, target) = make_layer(), rows()
    target = target.clamp(max=VOCAB - 4)
    logprobs = FusedHead(layer, vocab_size=VOCAB - 3)(hidden, target).logprobs
    logits = layer(hidden)  # all of them: cutting is the model's
    right = logits[..., :-3].log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
    torch.testing.assert_close(logprobs, right)
