"""Steps on real ranks: ``python -m benchmarks.sharded.ranks RANKS ROUNDS CASE... [ARM]``, as JSON.

With an ARM its memory is measured, in processes that do nothing else; without one all arms are
timed, in turns.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.check import compare, reference
from benchmarks.measure import describe, in_turns
from benchmarks.problem import Problem, make_problem
from benchmarks.shapes import MODELS, Case
from benchmarks.sharded.arms import ARMS, Arm
from benchmarks.timing import resident_growth
from benchmarks.work import WORKS

_TIMEOUT = timedelta(minutes=20)


def _worker(rank: int, ranks: int, rounds: int, case: Case, arm: str | None, folder: str) -> None:
    torch.set_num_threads(1)
    # for DeepSpeed: who this is, and where it compiles; elsewhere a stale lock may wait for ever
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in own.items()})
    os.environ["TORCH_EXTENSIONS_DIR"] = f"{sys.prefix}/extensions"
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=_TIMEOUT)
    found = _times(case, rounds) if arm is None else _memory(case, ARMS[arm])
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _memory(case: Case, arm: Arm) -> dict[str, int]:
    """Return the growth of the rank that grows most, from before the step to its peak."""
    tiny = replace(case, model=MODELS["tiny"], tokens=32)
    with _working(arm):
        arm.build(make_problem(tiny))[0]()  # libraries are loaded, threads started
        step = arm.build(make_problem(case, exact=False))[0]
        dist.barrier()
        growth = torch.tensor(resident_growth(step)[1] if _works(arm) else 0)
    dist.all_reduce(growth, dist.ReduceOp.MAX)
    return {"memory": int(growth)}


def _times(case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    problem = make_problem(case)
    exact = reference(problem)
    rows: dict[str, dict[str, Any]] = {}
    steps = {}
    for name, arm in ARMS.items():
        if arm.needs is not None and find_spec(arm.needs) is None:
            rows[name] = {"absent": f"{arm.needs} is not installed"}
            continue
        rows[name] = {"seconds": [], "errors": {}}
        try:
            steps[name] = _checked(arm, problem, exact, rows[name])
        except Exception as error:
            rows[name]["failure"] = describe(error)
    for name, step in in_turns(list(steps.items()), rounds):
        dist.barrier()
        start = time.perf_counter()
        with _working(ARMS[name]):
            if _works(ARMS[name]):
                step()
        dist.barrier()
        rows[name]["seconds"].append(time.perf_counter() - start)
    return rows


def _checked(arm: Arm, problem: Problem, exact: Any, row: dict[str, Any]) -> Any:
    step, joined = arm.build(problem)
    result = exact
    with _working(arm), _counted() as sent:
        if _works(arm):
            result = step()
    row["sent"] = sent[0]
    check = compare(joined(result), exact, problem)
    row["errors"], row["failure"] = check.errors, check.failure
    return step


def _works(arm: Arm) -> bool:
    return arm.ranks is None or dist.get_rank() < arm.ranks


@contextmanager
def _working(arm: Arm) -> Iterator[None]:
    """Give a single process the threads of all."""
    threads = torch.get_num_threads()
    torch.set_num_threads(dist.get_world_size() if arm.ranks == 1 else threads)
    yield
    torch.set_num_threads(threads)


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


def _main(
    ranks: str, rounds: str, model: str, tokens: str, dtype: str, work: str, *arm: str
) -> None:
    case = Case(MODELS[model], int(tokens), dtype, WORKS[work])
    with tempfile.TemporaryDirectory() as folder:
        which = arm[0] if arm else None
        mp.spawn(_worker, (int(ranks), int(rounds), case, which, folder), nprocs=int(ranks))
        print(Path(folder, "found.json").read_text())


if __name__ == "__main__":
    _main(*sys.argv[1:])
