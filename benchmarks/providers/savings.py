"""One loss of ours on one batch with more or less to do: masked rows, a frozen head, LoRA on it."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from benchmarks.check import reference
from benchmarks.problem import Problem, Result
from benchmarks.providers.base import Provider
from benchmarks.providers.ours import policy_loss_of, run_loss
from benchmarks.work import WORKS
from grpo_kernels import HeadLoRA

_RANK, _SCALING = 16, 2.0
_UPDATE = 0.02  # standard deviation of what the adapter adds to a logit


def _run_adapted(problem: Problem) -> Result:
    """Compute loss and gradients, those of the adapter's factors in place of the weight's."""
    lora = _adapter(problem.hidden, problem.weight)
    loss = policy_loss_of(problem, {"lora": lora})
    dhidden, da, db = torch.autograd.grad(loss, (problem.hidden, lora.a, lora.b))
    return Result(loss=loss.detach(), dhidden=dhidden, dweight=_flat(da, db))


def _exact_adapted(problem: Problem) -> tuple[Problem, Result]:
    """Return the problem of full weights, where the adapter is merged, and its exact results."""
    lora = _adapter(problem.hidden, problem.weight)
    a, b = lora.a.detach(), lora.b.detach()
    weight = (problem.weight.detach().float() + lora.scaling * (b @ a)).requires_grad_()
    work = WORKS[problem.work.name.removesuffix("-frozen")]
    merged = replace(problem, case=replace(problem.case, work=work), weight=weight)
    exact = reference(merged)
    dweight = exact.dweight
    assert dweight is not None
    a, b = a.to(dweight), b.to(dweight)
    gradients = _flat(lora.scaling * (b.t() @ dweight), lora.scaling * (dweight @ a.t()))
    return merged, replace(exact, dweight=gradients)


def _flat(da: Tensor, db: Tensor) -> Tensor:
    return torch.cat([da.flatten(), db.flatten()])


@lru_cache(maxsize=1)
def _adapter(hidden: Tensor, weight: Tensor) -> HeadLoRA:
    """Make factors in fp32, as PEFT keeps them."""
    generator = torch.Generator().manual_seed(2)

    def factor(shape: tuple[int, int], std: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(weight.device).requires_grad_()

    # a row of hidden states is about as long as the largest: its norm decides the update's size
    a = factor((_RANK, weight.shape[1]), 1 / hidden.detach().float().norm(dim=-1).mean().item())
    b = factor((weight.shape[0], _RANK), _UPDATE / (_SCALING * _RANK**0.5))
    return HeadLoRA(a=a, b=b, scaling=_SCALING)


def _variant(name: str, note: str, base: str | None = "all", metric_rows: str = "all") -> Provider:
    return Provider(
        name=f"ours, {name}",
        note=note,
        run=partial(run_loss, settings={"metric_rows": metric_rows}),
        info=lambda problem: {"base": f"ours, {base}"} if base else {},
    )


_LORA = replace(
    _variant("lora", f"the head is frozen under LoRA of rank {_RANK} in fp32", base="frozen"),
    run=_run_adapted,
    exact=_exact_adapted,
)
# by the work that each does; ``base`` is whose time it is measured by
VARIANTS: dict[Provider, str] = {
    _variant("all", "every token has a gradient", base=None): "dapo",
    _variant("masked", "half of the tokens masked"): "dapo-masked",
    _variant(
        "zero",
        'half of the tokens at zero advantage, metric_rows="all": they take the forward',
    ): "dapo-zero",
    _variant(
        "zero-active",
        'half of the tokens at zero advantage, metric_rows="active": they take nothing',
        metric_rows="active",
    ): "dapo-zero",
    _variant("frozen", "the head is frozen"): "dapo-frozen",
    _LORA: "dapo-frozen",
}
