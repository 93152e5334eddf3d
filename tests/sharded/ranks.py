"""Runs named cases on real ranks: one launch, all cases, and each rank's verdict on each."""

from __future__ import annotations

import faulthandler
import os
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Cases = Callable[[], Mapping[str, Callable[[], None]]]
_TIMEOUT = timedelta(seconds=120)
_LIMIT_S = 300
_PASSED = ""


def run_on_ranks(cases: Cases, size: int, folder: Path) -> dict[str, str]:
    """Run all ``cases`` on ``size`` processes; return the failures of each case, "" for none."""
    launched = mp.spawn(_worker, args=(cases, size, str(folder)), nprocs=size, join=False)
    deadline = time.monotonic() + _LIMIT_S
    while not launched.join(timeout=max(0.0, deadline - time.monotonic())):
        if time.monotonic() >= deadline:
            for process in launched.processes:
                process.kill()
            pytest.fail(f"the ranks have not ended in {_LIMIT_S} seconds")
    verdicts = [torch.load(folder / f"verdicts{rank}.pt") for rank in range(size)]
    return {
        name: "\n".join(f"rank {r}: {v[name]}" for r, v in enumerate(verdicts) if v[name])
        for name in verdicts[0]
    }


def run_alone(cases: Cases, folder: Path) -> dict[str, str]:
    """Run all ``cases`` in a process of their own; return the failures of each, "" for none."""
    mp.spawn(_alone, args=(cases, str(folder)), nprocs=1)
    return torch.load(folder / "verdicts.pt")


def _alone(rank: int, cases: Cases, folder: str) -> None:
    torch.set_num_threads(1)
    torch.save({name: _verdict(case) for name, case in cases().items()}, f"{folder}/verdicts.pt")


def _worker(rank: int, cases: Cases, size: int, folder: str) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    # for frameworks that read them
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in own.items()})
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    verdicts = {}
    for name, case in cases().items():
        verdicts[name] = _verdict(case)
        dist.barrier()  # a case that fails on one rank alone does not meet the next one of others
    torch.save(verdicts, f"{folder}/verdicts{rank}.pt")
    dist.destroy_process_group()
    os._exit(0)  # what libraries do as an interpreter ends is not under test


def _verdict(case: Callable[[], None]) -> str:
    torch.manual_seed(0)
    try:
        case()
    except (Exception, pytest.fail.Exception):
        return traceback.format_exc()
    return _PASSED
