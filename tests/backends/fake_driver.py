"""Lists what Triton would compile for a GPU, on a machine without one.

``install`` gives Triton a driver that names a device. Kernels launched on CPU tensors are then
bound and specialised as for that device, but neither compiled nor run: their results are whatever
memory holds. Only for a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import configs
from grpo_kernels.backends.registry import BACKENDS
from grpo_kernels.batch import host

Variants = dict[str, str]  # a digest of all that decides what is compiled -> the kernel's name


class _Driver:
    """What a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install() -> Variants:
    """Return the variants that are launched from now on."""
    found: Variants = {}

    def note(function: JITFunction, key: str, *_: Any, **__: Any) -> None:
        text = f"{function.cache_key} {key}"
        found[hashlib.sha256(text.encode()).hexdigest()] = function.fn.__name__

    driver.set_active(_Driver())
    JITFunction._do_compile = note  # a launch without a kernel ends there
    triton = BACKENDS["triton"]
    triton.unavailable = lambda: None  # type: ignore[method-assign]
    triton.unsuited = lambda device, dtype: None  # type: ignore[method-assign]
    configs.linear.device_class = lambda device: "sm_90"
    host.reading_is_free = lambda *_: False  # the host reads no result, as on a GPU
    return found
