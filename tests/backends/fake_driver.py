"""Lists what Triton compiles for a GPU, on a machine without one.

``install`` gives Triton a driver that names a device. Kernels launched on CPU tensors are then
bound and specialised as for that device, and not run: their results are whatever memory holds.
Nor are they compiled, except after ``install_compiler``. Only for a process without
``TRITON_INTERPRET``.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import choice, gpu_tiles, triton_backend
from grpo_kernels.backends.triton import extract
from grpo_kernels.batch import host

Variants = dict[str, str]  # a digest of all that decides what is compiled -> the kernel's name


class Driver:
    """What a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Compilations:
    """Names of the kernels that were asked for."""

    compiled: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)  # in the cache on disk


def install() -> Variants:
    """Return the variants that are launched from now on."""
    variants: Variants = {}

    def note(function: JITFunction, key: str, *_: Any, **__: Any) -> None:
        text = f"{function.cache_key} {key}"
        variants[hashlib.sha256(text.encode()).hexdigest()] = function.fn.__name__

    JITFunction._do_compile = note  # a launch without a kernel ends there
    driver.set_active(Driver())
    pretend("sm_90")
    return variants


def install_compiler() -> Compilations:
    """Return what is compiled from now on, and what is found on disk."""
    asked = Compilations()
    compiles = JITFunction._do_compile

    def compile_only(
        function: JITFunction, key: str, signature: Any, device: int, *rest: Any
    ) -> None:
        compiles(function, key, signature, device, *rest)
        function.device_caches[device][0].pop(key)  # the next launch ends here as well

    def note(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (asked.found if cache_hit else asked.compiled).append(src.name)

    JITFunction._do_compile = compile_only
    knobs.compilation.listener = note
    driver.set_active(Driver())
    pretend("sm_90")
    return asked


def pretend(arch: str) -> None:
    """Let the package take CPU tensors for those of a GPU."""
    triton = choice.BACKENDS["triton"]
    triton.unavailable = lambda: None  # type: ignore[method-assign]
    triton.unsuited = lambda device, dtype: None  # type: ignore[method-assign]
    for module in (choice, extract, gpu_tiles, triton_backend):
        module.device_class = lambda device: arch  # type: ignore[attr-defined]
    host.reading_is_free = lambda *_: False  # the host reads no result, as on a GPU
