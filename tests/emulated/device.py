"""A GPU for Triton that is an emulator: what is launched on CPU tensors is executed on them.

Every launch is executed twice, the second time with the last program and the last wave first, on
the same memory. What depends on the order is an error: programs and, between two barriers, waves
may run in any.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.backends.amd.driver import wrap_handle_tensordesc
from triton.backends.compiler import GPUTarget
from triton.backends.driver import expand_signature
from triton.runtime import driver

from tests.backends import fake_driver
from tests.emulated import binary, corrections
from tests.emulated.machine import Held, Machine, Work

SHARED_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}


@dataclass(frozen=True)
class Launch:
    """One launch, and what its first execution did."""

    kernel: str
    grid: tuple[int, int, int]
    warps: int
    work: Work
    seconds: float


LAUNCHES: list[Launch] = []


class _Launcher:
    """What Triton calls for each launch."""

    def __init__(self, src: Any, metadata: Any) -> None:
        signature = dict(src.signature)
        meta = getattr(metadata, "tensordesc_meta", None)
        self._types = _flat(expand_signature(signature.values(), meta, "tensordesc"))
        self._metadata = metadata
        self._launch = wrap_handle_tensordesc(self._execute, signature, meta)

    def __call__(self, x: int, y: int, z: int, stream: Any, code: Any, *rest: Any) -> None:
        _metadata, _of_launch, _enter, _exit, *arguments = rest
        self._launch(x, y, z, code, arguments)

    def _execute(
        self, x: int, y: int, z: int, code: binary.Binary, arguments: Iterable[Any]
    ) -> None:
        pairs = zip(self._types, _flat(arguments), strict=True)
        values = [(kind, value) for kind, value in pairs if kind != "constexpr"]
        tensors = [value.data for kind, value in values if kind[0] == "*" and value is not None]
        warps = self._metadata.num_warps
        block = _argument_block(values, (x, y, z), 64 * warps)
        own = Held("the arguments", ctypes.addressof(block), ctypes.addressof(block) + len(block))
        held = [own, *(_held(tensor) for tensor in tensors)]
        machine = Machine(code, warps, self._metadata.shared, own.start, held)
        before, start = [tensor.clone() for tensor in tensors], time.perf_counter()
        machine.run((x, y, z))
        seconds, after = time.perf_counter() - start, [tensor.clone() for tensor in tensors]
        LAUNCHES.append(Launch(code.name, (x, y, z), warps, machine.work(), seconds))
        for tensor, values_before in zip(tensors, before, strict=True):
            tensor.copy_(values_before)
        machine.run((x, y, z), backwards=True, counts=False)
        if not all(map(_same, tensors, after)):
            raise RuntimeError(f"{code.name}: other results where its waves run in reverse order")


def _flat(x: Any) -> list[Any]:
    return [z for y in x for z in _flat(y)] if isinstance(x, tuple | list) else [x]


def _held(x: Tensor) -> Held:
    """Return the memory from a tensor's first to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    size = (last + 1) * x.element_size() if x.numel() else 0
    name = f"a tensor {tuple(x.shape)} of {x.dtype}"
    return Held(name, x.data_ptr(), x.data_ptr() + size)


def _same(a: Tensor, b: Tensor) -> bool:
    whole = (x.clone(memory_format=torch.contiguous_format).view(-1) for x in (a, b))
    return torch.equal(*(x.view(torch.uint8) for x in whole))


_FORMATS = {"i1": "?", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d"}


def _argument_block(
    values: list[tuple[str, Any]], grid: tuple[int, int, int], threads: int
) -> ctypes.Array[ctypes.c_char]:
    """Lay out arguments as the ABI does: those of the kernel, two pointers of Triton's to scratch
    memory, and the hidden ones, which begin with numbers of programs and their sizes."""
    layout = "".join(_FORMATS.get(kind, "P") for kind, _ in values)
    found = [x.data_ptr() if isinstance(x, Tensor) else x or 0 for _, x in values]
    explicit = struct.pack(f"@{layout}PP", *found, 0, 0)
    hidden = struct.pack("<3I3H", *grid, threads, 1, 1)
    return ctypes.create_string_buffer(explicit + hidden, len(explicit) + 256)


class _Utils:
    def __init__(self, arch: str) -> None:
        self.arch = arch

    def get_device_properties(self, device: int) -> dict[str, Any]:
        shared = SHARED_BYTES[self.arch]
        return dict(max_shared_mem=shared, multiprocessor_count=4, warpSize=64, arch=self.arch)

    def load_binary(self, name: str, code: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, binary.load(name, code), 0, 0, 1024

    def unload_module(self, module: Any) -> None: ...


class _Driver(fake_driver.Driver):
    launcher_cls = _Launcher

    def __init__(self, arch: str) -> None:
        self.arch, self.utils = arch, _Utils(arch)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, 64)

    def set_current_device(self, device: int) -> None: ...

    def is_active(self) -> bool:
        return True


def install(arch: str = "gfx942") -> None:
    """Let every launch from now on run in the emulator; for a process without TRITON_INTERPRET."""
    corrections.apply()
    driver.set_active(_Driver(arch))
    fake_driver.pretend(arch)
