"""The divergence of a head from a teacher's, with its gradients, beside the other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import text
from benchmarks.check import TOLERANCE
from benchmarks.child import ask
from benchmarks.conftest import Session
from benchmarks.measure import add_growth, attempt, free, race
from benchmarks.results import Row
from benchmarks.timing import make_timer, resident_growth
from grpo_kernels import linear_divergence
from grpo_kernels.head import matmul_precision

_BETA = {"forward_kl": 0.0, "reverse_kl": 1.0, "jsd": 0.5}  # as TRL and Liger say it
BARE = "bare-gemms"
NOTES = {
    BARE: "the two products of the logits and the two of the gradients, by torch",
    "ours": "linear_divergence",
    "eager": "all logits of both, autograd",
    "trl": "ChunkedDivergenceFunction of TRL's DistillationTrainer",
    "liger": "LigerFusedLinearJSDLoss, not compiled",
}


@dataclass(frozen=True)
class Case:
    """A student's and a teacher's hidden states and heads."""

    kind: str
    tokens: int
    vocabulary: int
    depth: int
    teacher_depth: int
    dtype: str = "fp32"
    memory: bool = False

    def facts(self) -> dict[str, Any]:
        model = f"{self.kind}, teacher of {self.teacher_depth}"
        size = {"hidden": self.depth, "vocabulary": self.vocabulary}
        return {"model": model, "tokens": self.tokens, **size, "dtype": self.dtype}

    def __str__(self) -> str:
        return f"{self.kind}, T={self.tokens}, V={self.vocabulary}, D={self.depth}, {self.dtype}"


_CPU = [Case(kind, 1024, 151936, 896, 896, memory=kind == "forward_kl") for kind in _BETA]
_GPU = [Case(kind, 8192, 151936, 2048, 4096, "bf16", memory=True) for kind in _BETA]
CASES = {
    "tiny": [Case(kind, 32, 257, 32, 48) for kind in _BETA],
    "cpu": [*_CPU, Case("forward_kl", 1024, 151936, 896, 896, "bf16")],
    "gpu": _GPU[:1],
    "gpu-full": _GPU,
}


def names(case: Case) -> list[str]:
    return list(NOTES)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    rows, timer = [Row(name, NOTES[name]) for name in names], make_timer(session.device)
    tensors = _tensors(case, session.device)
    calls = {name: partial(_CALLS[name], case, *tensors) for name in names}
    with matmul_precision(torch.device(session.device), "fp32"):
        exact = _eager(case, *tensors)
        for row in rows:
            with attempt(row):
                found = calls[row.provider]()
                if row.provider != BARE:
                    _check(row, found, exact, TOLERANCE[case.dtype])
        del exact
        race([(row, calls[row.provider]) for row in rows], session.rounds(3), timer)
    if case.memory and not session.brief and session.device == "cpu":
        compared = [row for row in rows if row.provider != BARE]
        add_growth(compared, partial(ask, _growth, case))
    calls.clear()
    free(session.device)
    for row in rows:
        row.cells["extra MiB"] = text.mib(row.extra_bytes)
        row.cells |= {name: text.error(error) for name, error in row.errors.items()}
    return rows


def _tensors(case: Case, device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(scale).to(device, dtype)

    student = normal(case.tokens, case.depth), normal(case.vocabulary, case.depth, scale=0.1)
    teacher = normal(case.tokens, case.teacher_depth)
    return *student, teacher, normal(case.vocabulary, case.teacher_depth, scale=0.1)


def _growth(case: Case, name: str) -> int:
    _CALLS[name](Case(case.kind, 32, 257, 32, 48, case.dtype), *_tensors(CASES["tiny"][0], "cpu"))
    (_, *gradients), growth = resident_growth(partial(_CALLS[name], case, *_tensors(case, "cpu")))
    return growth - sum(x.nbytes for x in gradients)


def _check(row: Row, found: tuple[Tensor, ...], exact: tuple[Tensor, ...], allowed: float) -> None:
    for name, value, expected in zip(("loss", "dhidden", "dweight"), found, exact, strict=True):
        error = (value.float() - expected.float()).norm() / expected.float().norm()
        row.errors[name] = float(error)
    if max(row.errors.values()) > allowed:
        row.leave_out("wrong", f"errors {row.errors}")


def _bare(case: Case, hidden: Tensor, weight: Tensor, *teacher: Tensor) -> tuple[Tensor, ...]:
    torch.mm(teacher[0], teacher[1].t())
    logits = torch.mm(hidden, weight.t())
    return torch.mm(logits, weight), torch.mm(logits.t(), hidden)


def _graded(
    loss_of: Callable[..., Tensor], case: Case, hidden: Tensor, weight: Tensor, *teacher: Tensor
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    loss = loss_of(case, *leaves, *teacher)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def _ours(case: Case, *tensors: Tensor) -> Tensor:
    return linear_divergence(*tensors, kind=case.kind).loss


def _eager_loss(case: Case, hidden: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
    log_s = (hidden @ weight.t()).float().log_softmax(-1)
    log_t = (teacher[0] @ teacher[1].t()).float().log_softmax(-1)
    if case.kind == "forward_kl":
        return (log_t.exp() * (log_t - log_s)).sum(-1).mean()
    if case.kind == "reverse_kl":
        return (log_s.exp() * (log_s - log_t)).sum(-1).mean()
    middle = (0.5 * log_s.exp() + 0.5 * log_t.exp()).log()
    apart = log_t.exp() * (log_t - middle) + log_s.exp() * (log_s - middle)
    return 0.5 * apart.sum(-1).mean()


def _trl(case: Case, hidden: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    given = hidden, weight, None, *teacher, None, _BETA[case.kind]
    return ChunkedDivergenceFunction.apply(*given)[0].mean()


def _liger(case: Case, hidden: Tensor, weight: Tensor, *teacher: Tensor) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=_BETA[case.kind], compiled=False
    )
    target = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    return loss(hidden, weight, *teacher, target)


_eager = partial(_graded, _eager_loss)
_CALLS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    BARE: _bare,
    "ours": partial(_graded, _ours),
    "eager": _eager,
    "trl": partial(_graded, _trl),
    "liger": partial(_graded, _liger),
}


def test_divergence(row: Row) -> None:
    """Time a loss with its gradients."""
    assert row.seconds
