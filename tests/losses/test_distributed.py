"""The top-entropy threshold is one over all processes, whatever their shares of the tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from grpo_kernels.losses.gates import top_entropy_gate

SHARES = (5, 12)  # tokens of each process


def entropies() -> torch.Tensor:
    return torch.rand(sum(SHARES), generator=torch.Generator().manual_seed(0))


def worker(rank: int, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", len(SHARES))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(SHARES))
    mine = entropies().split(SHARES)[rank]
    torch.save(top_entropy_gate(mine, 0.3), f"{folder}/gate{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_gate_as_one(tmp_path: Path) -> None:
    mp.spawn(worker, args=(str(tmp_path),), nprocs=len(SHARES))
    got = torch.cat([torch.load(tmp_path / f"gate{rank}.pt") for rank in range(len(SHARES))])
    assert torch.equal(got, top_entropy_gate(entropies(), 0.3))
