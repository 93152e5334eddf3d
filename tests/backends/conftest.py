"""The kernels under test: native ones of every instruction set of this machine, and Triton's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from grpo_kernels import available_backends
from grpo_kernels.backends import RowStats
from grpo_kernels.backends.base import LinearStats, RowKernels
from grpo_kernels.backends.chunked import TORCH_ROWS
from grpo_kernels.backends.configs import LinearCase, LinearConfig
from grpo_kernels.backends.configs import linear as linear_tiles
from grpo_kernels.backends.cpu.entries import NativeEntries
from grpo_kernels.backends.cpu.linear import NativeLinear
from grpo_kernels.backends.cpu.rows import NativeRows
from grpo_kernels.backends.entries import TORCH_ENTRIES, EntryKernels
from grpo_kernels.head import Head
from tests.conftest import HAS_GPU
from tests.support.linear_problems import ISAS

CPU, TRITON_DEVICE = torch.device("cpu"), torch.device("cuda" if HAS_GPU else "cpu")
TRITON = [pytest.param("triton", marks=[pytest.mark.gpu] if HAS_GPU else [])]
KERNELS = [*ISAS, *(TRITON if "triton" in available_backends() else [])]


@dataclass(frozen=True)
class RowTarget:
    """Row kernels, and the device of their tiles."""

    kernels: RowKernels
    device: torch.device

    @property
    def native(self) -> bool:
        return isinstance(self.kernels, NativeRows)

    @property
    def interpreted(self) -> bool:
        """Whether they are slow, and see copies of whole storages."""
        return self.device.type == "cpu" and not self.native


@pytest.fixture(params=KERNELS)
def rows(request: pytest.FixtureRequest) -> RowTarget:
    if request.param in ISAS:
        return RowTarget(NativeRows(ISAS.index(request.param)), CPU)
    from grpo_kernels.backends.triton import TRITON_ROWS

    return RowTarget(TRITON_ROWS, TRITON_DEVICE)


@dataclass(frozen=True)
class LinearTarget:
    """A forward without a tile of logits, and the device of its inputs."""

    forward: LinearStats
    device: torch.device

    @property
    def native(self) -> bool:
        return isinstance(self.forward, NativeLinear)

    @property
    def interpreted(self) -> bool:
        return self.device.type == "cpu" and not self.native

    def __call__(
        self,
        hidden: Tensor,
        head: Head,
        target: Tensor,
        precision: str = "fp32",
        extras: bool = True,
    ) -> RowStats:
        return self.forward(hidden, head, target, precision, extras)


@pytest.fixture(params=KERNELS)
def linear(request: pytest.FixtureRequest) -> LinearTarget:
    """Return each forward; Triton's with small tiles."""
    if request.param in ISAS:
        return LinearTarget(NativeLinear(ISAS.index(request.param)), CPU)
    from grpo_kernels.backends.triton import linear_stats

    request.getfixturevalue("small_tiles")
    return LinearTarget(linear_stats, TRITON_DEVICE)


@dataclass(frozen=True)
class EntriesTarget:
    """Kernels of entries, the row kernels whose statistics they take, and their tensors' device."""

    kernels: EntryKernels
    rows: RowKernels
    device: torch.device

    @property
    def interpreted(self) -> bool:
        native = isinstance(self.kernels, NativeEntries) or self.kernels is TORCH_ENTRIES
        return self.device.type == "cpu" and not native

    def size(self, usual: int, interpreted: int) -> int:
        """Return a number of rows or columns: the interpreter takes milliseconds a device call."""
        return interpreted if self.interpreted else usual


@pytest.fixture(params=["torch", *KERNELS])
def entries(request: pytest.FixtureRequest) -> EntriesTarget:
    if request.param == "torch":
        return EntriesTarget(TORCH_ENTRIES, TORCH_ROWS, CPU)
    if request.param in ISAS:
        rank = ISAS.index(request.param)
        return EntriesTarget(NativeEntries(rank), NativeRows(rank), CPU)
    from grpo_kernels.backends.triton import TRITON_ENTRIES, TRITON_ROWS

    return EntriesTarget(TRITON_ENTRIES, TRITON_ROWS, TRITON_DEVICE)


# many splits, groups and steps over D at small sizes
SMALL = LinearConfig(16, 32, 16, 4, 2, subtiles=2, tiles=2, group=2, descriptors=0)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearCase, "config", SMALL)
    monkeypatch.setattr(linear_tiles, "UNALIGNED_CONFIG", SMALL)


@pytest.fixture
def device(device: torch.device) -> torch.device:
    """Return where Triton's kernels run: a GPU, or a CPU in the interpreter."""
    from triton import knobs

    if device.type == "cpu" and not knobs.runtime.interpret:
        pytest.skip("the interpreter is off")
    return device


@pytest.fixture
def threads() -> Iterator[None]:
    """Let a test set the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
