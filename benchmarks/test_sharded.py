"""A head over several ranks, against one process and against eager torch in the same wrapping."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.check import against, compare, reference
from benchmarks.child import ask
from benchmarks.conftest import Session, check_row
from benchmarks.measure import add_growth, attempt
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.base import lacking
from benchmarks.providers.ours import run
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, MODELS, Case, make_case
from benchmarks.timing import in_turns, resident_growth
from grpo_kernels import FusedHead, VocabShard, policy_loss

_RANKS, _ROUNDS = 2, 3
Step = Callable[[], Result | None]  # every rank calls it, with its part of the gradients
Built = tuple[Step, Callable[[Result], Result]]  # and how the ranks' results are joined


def _one(problem: Problem) -> Built:
    """Let one rank use the threads of all ranks, while the others wait."""

    def step() -> Result | None:
        if dist.get_rank() > 0:
            return None
        torch.set_num_threads(_RANKS)
        try:
            return run(problem)
        finally:
            torch.set_num_threads(1)

    return step, lambda result: result


def _vocabulary(problem: Problem) -> Built:
    weight = problem.weight.detach().chunk(_RANKS)[dist.get_rank()].clone()
    shard = VocabShard.of(dist.group.WORLD, weight.requires_grad_())
    step = partial(run, replace(problem, weight=weight), vocab_shard=shard)
    return step, lambda result: replace(result, dweight=_gathered(result.dweight))


class _Model(nn.Module):
    """A model that consists of a head."""

    def __init__(self, weight: Tensor, fused: bool) -> None:
        super().__init__()
        self.lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        self.lm_head.weight.data = weight.detach().clone()
        if fused:
            self.lm_head = FusedHead(self.lm_head)
        self._fused = fused

    def forward(self, problem: Problem) -> Tensor:
        if self._fused:
            return self.lm_head.policy_loss(problem.hidden, problem.batch(), problem.loss).loss
        logits, target = self.lm_head(problem.hidden), problem.target
        logp = logits.float().log_softmax(-1).gather(-1, target[..., None]).squeeze(-1)
        return policy_loss(logp.flatten(), problem.batch(), problem.loss).loss


def _fsdp(fused: bool, problem: Problem) -> Built:
    from torch.distributed.fsdp import fully_shard

    model, mine = _Model(problem.weight, fused), _share(problem)
    fully_shard(model.lm_head)
    fully_shard(model)
    weight: Any = model.lm_head.weight

    def step() -> Result:
        mine.hidden.grad = weight.grad = None
        loss = model(mine)
        loss.backward()
        return Result(loss.detach(), dhidden=mine.hidden.grad)

    return step, lambda result: _mean(result, weight.grad.full_tensor())


def _zero3(fused: bool, problem: Problem) -> Built:
    # it compiles there; a stale lock elsewhere may block forever
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{sys.prefix}/extensions"
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    model, mine = _Model(problem.weight, fused), _share(problem)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": problem.weight.dtype == torch.bfloat16},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step() -> Result:
        mine.hidden.grad = None
        engine.optimizer.zero_grad()
        loss = engine(mine)
        engine.backward(loss)
        return Result(loss.detach(), dhidden=mine.hidden.grad)

    return step, lambda result: _mean(result, safe_get_full_grad(model.lm_head.weight))


# a way to run the step, and its note
ARMS: dict[str, tuple[str, Callable[[Problem], Built]]] = {
    "one process": ("the whole head, a thread for each of the ranks", _one),
    "ours, vocabulary": ("a shard of the vocabulary on each rank, all tokens", _vocabulary),
    "ours, FSDP2": ("FusedHead in its own unit, a share of the tokens", partial(_fsdp, True)),
    "eager, FSDP2": ("torch's logits in the same wrapping", partial(_fsdp, False)),
    "ours, ZeRO-3": ("the same under DeepSpeed", partial(_zero3, True)),
    "eager, ZeRO-3": ("torch's logits under DeepSpeed", partial(_zero3, False)),
}
NOTES = {name: note for name, (note, _) in ARMS.items()}


def _share(problem: Problem) -> Problem:
    """Return this rank's sequences."""
    return problem.share(dist.get_rank(), _RANKS)


def _mean(result: Result, dweight: Tensor) -> Result:
    """Join the results of ranks for their own sequences."""
    loss: Any = result.loss
    loss = loss.clone()
    dist.all_reduce(loss)
    return Result(loss / _RANKS, dhidden=_gathered(result.dhidden) / _RANKS, dweight=dweight)


def _gathered(part: Tensor | None) -> Tensor:
    parts: list[Any] = [None] * _RANKS
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


_LARGE = ((1024, "fp32"), (1024, "bf16"), (4096, "bf16"))
CASES: dict[str, list[Case]] = {
    "tiny": [make_case("dapo", "tiny", 32, dtype) for dtype in DTYPES],
    "quick": [make_case("dapo", "small", 128, dtype) for dtype in DTYPES],
    # with many tokens, logits would need more memory than the gathered head
    "cpu": [make_case("dapo", "qwen2.5-0.5b", *each) for each in _LARGE],
}


def measure(case: Case, rows: Sequence[Row], session: Session) -> None:
    for row in rows:
        row.leave_out("absent", lacking("deepspeed") if "ZeRO" in row.provider else None)
    on_ranks = partial(ask, processes=_RANKS)
    with attempt(*rows):
        for row, found in zip(
            rows, on_ranks(_times, rows, case, session.rounds(_ROUNDS)), strict=True
        ):
            vars(row).update(vars(found))
    if not session.brief:
        add_growth(rows, partial(on_ranks, _growth, case))


def about(case: Case, device: str) -> str:
    ranks = f"{_RANKS} ranks over gloo on one machine, a thread each"
    return f"{ranks}; {against(case, device)}"


def _growth(case: Case, name: str) -> int:
    """Return the largest growth of a rank, from before the step to its peak."""
    build = ARMS[name][1]
    build(make_problem(replace(case, model=MODELS["tiny"], tokens=32)))[0]()  # loads libraries
    step = build(make_problem(case, exact=False))[0]
    dist.barrier()
    growth = torch.tensor(resident_growth(step)[1])
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    return int(growth)


def _times(rows: Sequence[Row], case: Case, rounds: int) -> list[Row]:
    """Check every arm, and time those that pass in turns, until all ranks are done."""
    problem = make_problem(case)
    exact = reference(problem)
    steps: list[tuple[Row, Step]] = []
    for row in filter(lambda row: row.runs, rows):
        with attempt(row):
            step, joined = ARMS[row.provider][1](problem)
            with _counted() as sent:
                result = step()
            if sent:
                states = case.tokens * (32 + 4 * case.model.hidden)
                share = f"{sum(sent)} ({sum(sent) / states:.5g})"
                row.cells["bytes sent (of T (32 + 4 D))"] = share
            row.errors, wrong = compare(joined(result or exact), exact, problem)
            row.leave_out("wrong", wrong)
            steps.append((row, step))
    for row, step in in_turns(
        steps, rounds
    ):  # including wrong arms, which other ranks may not know
        dist.barrier()
        start = time.perf_counter()
        step()
        dist.barrier()
        if row.runs:
            row.seconds.append(time.perf_counter() - start)
    return rows


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this rank hands to collectives."""
    sent: list[int] = []

    def counted(call: Callable[..., Any], sends: int) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            sent.append(args[sends].nbytes)
            return call(*args, **kwargs)

        return collective

    gather, reduce = counted(dist.all_gather, 1), counted(dist.all_reduce, 0)
    with patch.multiple(dist, all_gather=gather, all_reduce=reduce):
        yield sent


test_sharded = check_row
