"""The top-entropy threshold is one over all processes, whatever their shares of the tokens."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from grpo_kernels.losses.gates import top_entropy_gate
from tests.support import launch

SHARES = (5, 12)  # tokens of each process


def entropies() -> torch.Tensor:
    return torch.rand(sum(SHARES), generator=torch.Generator().manual_seed(0))


def gate() -> torch.Tensor:
    return top_entropy_gate(entropies().split(SHARES)[dist.get_rank()], 0.3)


@pytest.mark.slow
def test_two_processes_gate_as_one() -> None:
    assert torch.equal(torch.cat(launch.run(gate)), top_entropy_gate(entropies(), 0.3))
