"""What NeMo-RL's function is held to on ranks: the whole head's values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels.integrations import nemo_rl
from grpo_kernels.testing import assert_all_as_exact_as
from tests.integrations.host_stand_ins import NEMO_RL
from tests.sharded.checks import expect
from tests.support.head_problems import (
    FLOOR,
    Case,
    Modules,
    Results,
    S,
    bounds,
    eager,
    joined,
    outer,
    own,
    problem,
    shares,
    with_host,
    without,
)


def cases(kind: str) -> dict[str, Any]:
    return with_host(NEMO_RL, kind, _cases())


def _cases() -> Iterator[tuple[str, Case]]:
    for dtype in FLOOR:
        for split in (True, False):
            yield f"{dtype}, sequence parallel: {split}", partial(check, dtype, split)
    yield "in place", check_in_place
    yield "inference", check_inference
    yield "refused", refused


def call_host(modules: Modules, hidden: Tensor, weight: Tensor, **more: Any) -> Any:
    ids = problem(torch.float32)[2]
    options = {**bounds(), "tp_group": dist.group.WORLD, "chunk_size": 3} | more
    function = modules["model_utils"].from_parallel_hidden_states_to_logprobs
    return function(hidden, weight, False, ids, **options)


def leaves(dtype: torch.dtype, split: bool) -> tuple[Tensor, Tensor]:
    hidden, weight, _ = problem(dtype)
    hidden = hidden.transpose(0, 1).contiguous()  # (S, B, D)
    return own(hidden) if split else hidden.requires_grad_(), own(weight)


def check(dtype: torch.dtype, split: bool, modules: Modules) -> None:
    def results() -> Results:
        hidden, weight = leaves(dtype, split)
        logprobs = call_host(modules, hidden, weight)
        dhidden, dweight = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
        dhidden = (joined(dhidden) if split else dhidden).transpose(0, 1)
        return {"logprobs": logprobs.detach(), "dhidden": dhidden, "dweight": joined(dweight)}

    theirs = without(eager(dtype), "entropy")
    # theirs takes no whole hidden states where there are more ranks
    if shares(modules["model_utils"]) and (split or dist.get_world_size() == 1):
        theirs = results()
    with nemo_rl.enabled():
        found = results()
    exact = without(eager(torch.float64), "entropy")
    assert_all_as_exact_as(found, theirs, exact, FLOOR[dtype], FLOOR[dtype])


def check_in_place(modules: Modules) -> None:
    """Divide the result in place, as the host does, and with one sequence, where no copy is due."""
    hidden, weight = leaves(torch.float32, split=False)
    hidden = hidden[:, :1].detach().requires_grad_()
    ids = problem(torch.float32)[2][:1]
    with nemo_rl.enabled():
        function = modules["model_utils"].from_parallel_hidden_states_to_logprobs
        out = function(hidden, weight, None, ids, **bounds(), tp_group=dist.group.WORLD)
        once = torch.autograd.grad(out.sum(), hidden)[0]
        out = function(hidden, weight, None, ids, **bounds(), tp_group=dist.group.WORLD)
        halved = torch.autograd.grad(out.div_(2).sum(), hidden)[0]
    assert out.shape == (1, S - 1) and out.is_contiguous()
    torch.testing.assert_close(halved, once / 2)


def check_inference(modules: Modules) -> None:
    with nemo_rl.enabled():
        out = call_host(modules, *leaves(torch.float32, split=True), inference_only=True)
    assert not out.requires_grad
    torch.testing.assert_close(out, eager(torch.float32)["logprobs"])


def refused(modules: Modules) -> None:
    hidden, weight = leaves(torch.float32, split=False)
    start = bounds()["vocab_start_index"]
    with nemo_rl.enabled():
        call = partial(call_host, modules, hidden, weight)
        expect("vocab_start_index: expected", partial(call, vocab_start_index=start + 1))
        expect("vocab_end_index: expected", partial(call, vocab_end_index=start))
        expect("tp_group: expected a process group", partial(call, tp_group=None))
        expect(
            "tensor_parallel_hidden_states: expected 8 rows",
            partial(call_host, modules, hidden[:3], weight),
        )
        if dist.get_world_size() > 1:
            expect("cp_group: expected a group of one", partial(call, cp_group=dist.group.WORLD))
