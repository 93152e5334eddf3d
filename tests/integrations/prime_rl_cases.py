"""prime-rl's head under FSDP2."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from grpo_kernels.integrations import prime_rl
from tests.integrations.host_stand_ins import PRIME_RL
from tests.support.head_problems import D, Modules, S, V, problem, with_host


def cases(kind: str) -> dict[str, Any]:
    return with_host(PRIME_RL, kind, [("FSDP2", check_fsdp)])


def check_fsdp(modules: Modules) -> None:
    """Shard a head that is a unit by itself, each rank with a sequence of its own."""
    rank, (hidden, weight, ids) = dist.get_rank(), problem(torch.float32)
    temperature = torch.full((1, S), 0.7)

    def gradients(shard: bool) -> tuple[Tensor, Tensor]:
        head = modules["lm_head"].FusedOutputLinear(D, V, chunk_size=3)
        head.weight = torch.nn.Parameter(weight.clone())
        if shard:
            fully_shard(head, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
        row = hidden[rank : rank + 1].clone().requires_grad_()
        head(row, ids[rank : rank + 1], temperature=temperature)["logprobs"].sum().backward()
        if shard:
            return row.grad, head.weight.grad.full_tensor()
        dist.all_reduce(head.weight.grad)
        return row.grad, head.weight.grad / dist.get_world_size()

    expected = gradients(shard=False)
    with prime_rl.enabled():
        torch.testing.assert_close(gradients(shard=True), expected)
