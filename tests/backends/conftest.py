"""The kernels under test: native ones of every instruction set of this machine, and Triton's."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch

from grpo_kernels import available_backends
from grpo_kernels.backends import BACKENDS, Backend, cpu, gpu_tiles
from grpo_kernels.backends.cpu import Native
from grpo_kernels.backends.gpu_tiles import LinearConfig
from tests.conftest import HAS_GPU

ISAS = [] if BACKENDS["cpu"].unavailable() else cpu.isas()
TRITON = [pytest.param("triton", marks=[pytest.mark.gpu] if HAS_GPU else [])]
KERNELS = [*ISAS, *(TRITON if "triton" in available_backends() else [])]


@dataclass(frozen=True)
class Kernels:
    """One implementation: of an instruction set, Triton's, or torch's."""

    name: str

    @property
    def native(self) -> bool:
        return self.name in ISAS

    @property
    def device(self) -> torch.device:
        return torch.device("cuda" if HAS_GPU and self.name == "triton" else "cpu")

    @property
    def interpreted(self) -> bool:
        """Whether they are slow, and see copies of whole storages."""
        return self.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"

    def size(self, usual: int, interpreted: int) -> int:
        """Return a number of rows or columns: the interpreter takes milliseconds a device call."""
        return interpreted if self.interpreted else usual

    @property
    def backend(self) -> Backend:
        if self.native:
            return Native(ISAS.index(self.name))
        return BACKENDS["chunked" if self.name == "torch" else self.name]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return Kernels(request.param)


# many splits, groups and steps over D at small sizes
SMALL = LinearConfig(16, 32, 16, 4, 2, subtiles=2, tiles=2, group=2, descriptors=0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tiles, "aligned_config", lambda device: SMALL)
    monkeypatch.setattr(gpu_tiles, "UNALIGNED_CONFIG", SMALL)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """Return where Triton's kernels run: a GPU, or a CPU in the interpreter."""
    if "triton" not in available_backends():
        pytest.skip("the interpreter is off")
    return device
