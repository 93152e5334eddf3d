"""A head over several ranks, against one process and against eager torch in the same wrapping."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from benchmarks.check import against, compare, reference
from benchmarks.conftest import Session
from benchmarks.measure import attempt, measure_apart
from benchmarks.problem import Problem, Result, make_problem
from benchmarks.providers.base import lacking
from benchmarks.providers.ours import run
from benchmarks.results import Row
from benchmarks.shapes import DTYPES, MODELS, Case, make_case
from benchmarks.timing import in_turns, resident_growth
from grpo_kernels import FusedHead, VocabShard, policy_loss

_RANKS, _ROUNDS = 2, 3
_TIMEOUT = timedelta(minutes=20)
Step = Callable[[], Result]  # every rank calls it; with its part of the gradients
Built = tuple[Step, Callable[[Result], Result]]  # and how the ranks' results are joined


def _one(problem: Problem) -> Built:
    return partial(run, problem), lambda result: result


def _vocabulary(problem: Problem) -> Built:
    weight = problem.weight.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    weight.requires_grad_()
    assert dist.group.WORLD is not None
    shard = VocabShard.of(dist.group.WORLD, weight)

    def joined(result: Result) -> Result:
        assert result.dweight is not None
        return replace(result, dweight=_gathered(result.dweight))

    return partial(run, replace(problem, weight=weight), vocab_shard=shard), joined


class _Model(nn.Module):
    """A model that is nothing but its head."""

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
        return Result(loss.detach(), dhidden=mine.hidden.grad, dweight=weight.grad)

    def joined(result: Result) -> Result:
        whole: Any = result.dweight
        return _mean(replace(result, dweight=whole.full_tensor()))

    return step, joined


def _zero3(fused: bool, problem: Problem) -> Built:
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

    def joined(result: Result) -> Result:
        return _mean(replace(result, dweight=safe_get_full_grad(model.lm_head.weight)))

    return step, joined


ALONE = "one process"
# a way to run the step, and what is said of it
ARMS: dict[str, tuple[str, Callable[[Problem], Built]]] = {
    ALONE: ("the whole head, a thread for each of the ranks", _one),
    "ours, vocabulary": ("a shard of the vocabulary on each rank, all tokens", _vocabulary),
    "ours, FSDP2": (
        "FusedHead in a unit of its own, a share of the tokens",
        partial(_fsdp, True),
    ),
    "eager, FSDP2": ("torch's logits in the same wrapping", partial(_fsdp, False)),
    "ours, ZeRO-3": ("the same under DeepSpeed", partial(_zero3, True)),
    "eager, ZeRO-3": ("torch's logits under DeepSpeed", partial(_zero3, False)),
}


def _share(problem: Problem) -> Problem:
    """Return this rank's sequences."""
    return problem.share(dist.get_rank(), dist.get_world_size())


def _mean(result: Result) -> Result:
    """Join what ranks have found for sequences of their own."""
    ranks = dist.get_world_size()
    assert result.loss is not None and result.dhidden is not None
    loss = result.loss.clone()
    dist.all_reduce(loss)
    return replace(result, loss=loss / ranks, dhidden=_gathered(result.dhidden) / ranks)


def _gathered(part: Tensor) -> Tensor:
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat(parts)


_LARGE = ((1024, "fp32"), (1024, "bf16"), (4096, "bf16"))
CASES: dict[str, list[Case]] = {
    "tiny": [make_case("dapo", "tiny", 32, dtype) for dtype in DTYPES],
    "quick": [make_case("dapo", "small", 128, dtype) for dtype in DTYPES],
    # of many tokens the logits would take more memory than the gathered head
    "cpu": [make_case("dapo", "qwen2.5-0.5b", *each) for each in _LARGE],
    "gpu": [],
    "gpu-full": [],
}


def names(case: Case) -> list[str]:
    return list(ARMS)


def measure(case: Case, names: Sequence[str], session: Session) -> list[Row]:
    rows = [Row(name, ARMS[name][0]) for name in names]
    for row in rows:
        row.leave_out("absent", lacking("deepspeed") if "ZeRO" in row.provider else None)
    times, growth = partial(_on_ranks, _times), partial(_on_ranks, _growth)
    return measure_apart(rows, times, growth, case, session.rounds(_ROUNDS), not session.brief)


def about(case: Case, device: str) -> str:
    ranks = f"{_RANKS} ranks over gloo on one machine, a thread each"
    return f"{ranks}; {against(case, device)}"


def _on_ranks(call: Callable[[Case, Any], Any], case: Case, argument: Any) -> Any:
    """Call it on every rank, each a process; return what the first returns."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_worker, (call, case, argument, Path(folder)), nprocs=_RANKS)
        return pickle.loads(Path(folder, "found").read_bytes())


def _worker(
    rank: int, call: Callable[[Case, Any], Any], case: Case, argument: Any, folder: Path
) -> None:
    torch.set_num_threads(1)
    # for DeepSpeed: who this is, and where it compiles; elsewhere a stale lock may wait for ever
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": _RANKS, "LOCAL_WORLD_SIZE": _RANKS}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{sys.prefix}/extensions"
    store = dist.FileStore(str(folder / "store"), _RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS, timeout=_TIMEOUT)
    found = call(case, argument)
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()


def _growth(case: Case, name: str) -> int:
    """Return the growth of the rank that grows most, from before the step to its peak."""
    build = ARMS[name][1]
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    # libraries are loaded, threads started
    _run(name, lambda: build(make_problem(tiny))[0]())
    step = build(make_problem(case, exact=False))[0]
    dist.barrier()
    growth = torch.tensor(_run(name, lambda: resident_growth(step)[1]) or 0)
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    return int(growth)


def _times(case: Case, rounds: int) -> list[Row]:
    """Check every arm, and time those that passed in turns: all ranks are waited for."""
    problem = make_problem(case)
    exact = reference(problem)
    rows = {name: Row(name, note) for name, (note, _) in ARMS.items()}
    steps: list[tuple[Row, Step]] = []
    for name, row in rows.items():
        with attempt(row):
            step, joined = ARMS[name][1](problem)
            with _counted() as sent:
                result = _run(name, step)
            if sent[0]:
                states = case.tokens * (32 + 4 * case.model.hidden)
                row.cells["bytes sent (of T (32 + 4 D))"] = f"{sent[0]} ({sent[0] / states:.5g})"
            row.errors, wrong = compare(joined(result or exact), exact, problem)
            row.leave_out("wrong", wrong)
            steps.append((row, step))
    for row, step in in_turns(steps, rounds):  # also who is wrong: other ranks may not know it
        dist.barrier()
        start = time.perf_counter()
        _run(row.provider, step)
        dist.barrier()
        if row.runs:
            row.seconds.append(time.perf_counter() - start)
    return list(rows.values())


def _run(name: str, call: Callable[[], Any]) -> Any:
    """Call it on the ranks that work: a single one has the threads of all; others get None."""
    if name != ALONE:
        return call()
    if dist.get_rank() > 0:
        return None
    torch.set_num_threads(dist.get_world_size())
    try:
        return call()
    finally:
        torch.set_num_threads(1)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Count the bytes that this rank hands to collectives."""
    sent, gather, reduce = [0], dist.all_gather, dist.all_reduce

    def counted_gather(out: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += x.nbytes
        return gather(out, x, *args, **kwargs)

    def counted_reduce(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += x.nbytes
        return reduce(x, *args, **kwargs)

    with patch.multiple(dist, all_gather=counted_gather, all_reduce=counted_reduce):
        yield sent


def test_sharded(row: Row) -> None:
    """Time a step over several ranks."""
    assert row.seconds
