"""Heads under LoRA, with the exact answer: fp64 autograd on the merged weight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_kernels import HeadLoRA
from grpo_kernels.testing import Problem, make_problem

NAMES = ("dhidden", "dweight", "dbias", "da", "db")


@dataclass(frozen=True)
class LoRAProblem:
    """A problem and an adapter of its head."""

    problem: Problem
    lora: HeadLoRA

    def to(
        self, device: torch.device | str, dtype: torch.dtype, factors: torch.dtype
    ) -> LoRAProblem:
        """Return the same values as fresh leaves, the adapter's in a dtype of its own."""
        a, b = (x.detach().to(device, factors).requires_grad_() for x in (self.lora.a, self.lora.b))
        return LoRAProblem(self.problem.to(device, dtype), replace(self.lora, a=a, b=b))

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """In the order of ``NAMES``."""
        problem = self.problem
        return (problem.hidden, problem.weight, problem.bias, self.lora.a, self.lora.b)

    @property
    def merged(self) -> Tensor:
        return self.problem.weight + self.lora.scaling * self.lora.b @ self.lora.a

    def frozen(self) -> LoRAProblem:
        """Return the same with a base that needs no gradient."""
        base = {name: getattr(self.problem, name).detach() for name in ("weight", "bias")}
        return replace(self, problem=replace(self.problem, **base))


def lora_problem(rank: int = 3, size: float = 0.3, **shape: int) -> LoRAProblem:
    """Make a problem in fp64, with values that bf16 holds exactly."""
    problem = make_problem(**shape)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(11)
    columns, depth = problem.weight.shape
    a, b = (
        (torch.randn(*sizes, generator=generator) * scale).bfloat16().double()
        for sizes, scale in (((rank, depth), 0.5), ((columns, rank), size))
    )
    return LoRAProblem(problem, HeadLoRA(a=a.requires_grad_(), b=b.requires_grad_(), scaling=0.75))


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an op makes, views and in-place results aside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs or {}))
            if isinstance(x, Tensor)
        }
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, x.numel())
        return out


@contextmanager
def largest_allocation() -> Iterator[_Largest]:
    with _Largest() as seen:
        yield seen
