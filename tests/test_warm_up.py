"""warm_up runs the loss on a few rows and leaves nothing behind; what it compiles is tested in
``tests/backends/test_triton_compile.py``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels import HeadLoRA, LossConfig, available_backends, warm_up
from tests.support.memory import Largest

D, V = 24, 70
ALL = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
triton = pytest.mark.skipif("triton" not in available_backends(), reason="no triton")


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
    weight = leaf(V, 1024)
    with Largest() as seen:
        warm_up(weight, LossConfig(), inputs=("old_logprobs",), backend="triton")
    assert 0 < seen.elements <= weight.numel() // 2


@triton
def test_a_group_of_a_process_that_no_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ValueError, match="group: expected LOCAL_RANK"):
        warm_up(leaf(V, D), LossConfig(), group=object(), backend="triton")
