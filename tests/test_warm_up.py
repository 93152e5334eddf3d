"""warm_up runs the loss on a few rows and leaves nothing behind; what it compiles is tested in
``tests/backends/test_triton_warm_up.py``."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_kernels import HeadLoRA, LossConfig, available_backends, warm_up

D, V = 24, 70
ALL = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
module = importlib.import_module("grpo_kernels.warm_up")
triton = pytest.mark.skipif("triton" not in available_backends(), reason="no triton")


class RanError(Exception):
    pass


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_plan(*_: object) -> None:
        raise RanError

    monkeypatch.setattr(module, "run_plan", run_plan)


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


@triton
@pytest.mark.parametrize("gradients", [True, False])
def test_leaves_nothing_behind(gradients: bool) -> None:
    weight, bias, lora = leaf(V, D), leaf(V), HeadLoRA(a=leaf(2, D), b=leaf(V, 2))
    called: list[Tensor] = []
    leaves = (weight, bias, lora.a, lora.b)
    for x in leaves:
        x.register_hook(called.append)
    values, state = [x.detach().clone() for x in leaves], torch.get_rng_state()
    config = LossConfig(beta=0.1)
    options = {"bias": bias, "lora": lora, "inputs": ALL, "backend": "triton"}
    with torch.no_grad():  # whatever the mode of the caller
        warm_up(weight, config, gradients=gradients, **options)
    assert all(x.grad is None and x.requires_grad for x in leaves) and not called
    assert all(map(torch.equal, leaves, values))
    assert torch.equal(torch.get_rng_state(), state)


@triton
def test_makes_no_tensor_of_the_size_of_the_weight() -> None:
    depth, largest = 4096, 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if type(out) is Tensor and out.untyped_storage().data_ptr() != weight.data_ptr():
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    weight = leaf(V, depth)
    with Sizes():
        warm_up(weight, LossConfig(), inputs=("old_logprobs",), backend="triton")
    assert 0 < largest <= weight.nbytes // 2


@pytest.mark.usefixtures("refused")
def test_does_nothing_where_nothing_is_compiled() -> None:
    for backend in ("auto", "chunked", "reference"):
        warm_up(leaf(V, D), LossConfig(), backend=backend)
    if "triton" in available_backends():
        with pytest.raises(RanError):
            warm_up(leaf(V, D), LossConfig(), backend="triton")


@pytest.mark.parametrize(("rank", "order"), [("0", "run barrier"), ("3", "barrier run")])
def test_the_first_of_a_machine_compiles_first(
    monkeypatch: pytest.MonkeyPatch, rank: str, order: str
) -> None:
    group, events = object(), []

    def barrier(of: object) -> None:
        assert of is group
        events.append("barrier")

    monkeypatch.setattr(dist, "barrier", barrier)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with module._first_of_each_machine_first(group):
        events.append("run")
    assert events == order.split()


@triton
def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, config = leaf(V, D), LossConfig()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for options, message in (
        ({"inputs": ["logprobs"]}, "inputs: expected some of old_logprobs, .*got 'logprobs'"),
        ({"inputs": "old_logprobs"}, "inputs: expected some of"),
        ({"group": object()}, "group: expected LOCAL_RANK"),
        ({"schedule": "three"}, "schedule: expected"),
        ({"backend": "gpu"}, "backend: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            warm_up(weight, config, **{"backend": "triton", **options})
    late = LossConfig(top_entropy_quantile=0.2)
    with pytest.raises(ValueError, match="schedule: 'one_pass' cannot run"):
        warm_up(weight, late, backend="triton", schedule="one_pass")
