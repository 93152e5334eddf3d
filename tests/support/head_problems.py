"""A head and hidden states, the same on all ranks, and what full logits give for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.checkouts import Host
from tests.integrations.host_stand_ins import statistics

B, S, D, V = 3, 8, 16, 54
FLOOR = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
Modules = dict[str, ModuleType]
Results = dict[str, Tensor]
Case = Callable[[Modules], None]


def with_host(host: Host, kind: str, cases: Iterable[tuple[str, Case]]) -> dict[str, Any]:
    """Return the cases, each with the host imported: its stand-in, or the real one."""

    def run(case: Case) -> None:
        with host.present(kind) as modules:
            case(modules)

    return {name: partial(run, case) for name, case in cases}


def shares(module: ModuleType) -> bool:
    """Return whether the host's own function runs on these ranks: stand-ins share nothing."""
    return dist.get_world_size() == 1 or hasattr(module, "__file__")


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states (B, S, D), the weight and ids (B, S), the same on all ranks."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(B, S, D, generator=generator).bfloat16().to(dtype)
    weight = (torch.randn(V, D, generator=generator) * 0.4).bfloat16().to(dtype)
    return hidden, weight, torch.randint(0, V, (B, S), generator=generator)


def outer() -> Tensor:
    return torch.randn(B, S - 1, generator=torch.Generator().manual_seed(7))


def own(x: Tensor) -> Tensor:
    """Return this rank's rows, as a leaf."""
    part = x.detach().chunk(dist.get_world_size())[dist.get_rank()]
    return part.clone().requires_grad_()


def joined(part: Tensor, dim: int = 0) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach())
    return torch.cat(parts, dim)


def bounds() -> dict[str, Any]:
    rank, rows = dist.get_rank(), V // dist.get_world_size()
    return {"vocab_start_index": rank * rows, "vocab_end_index": (rank + 1) * rows}


def eager(dtype: torch.dtype, temperature: float = 1.0) -> Results:
    """Return what full logits give in one process."""
    hidden, weight, ids = problem(dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.t()
    wide = logits if dtype == torch.float64 else logits.float()
    logprobs, entropy = statistics(wide[:, :-1] / temperature, ids[:, 1:])
    dhidden, dweight = torch.autograd.grad((logprobs * outer()).sum(), [hidden, weight])
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    return found | {"dhidden": dhidden, "dweight": dweight}


def without(found: Results, name: str) -> Results:
    return {key: value for key, value in found.items() if key != name}
