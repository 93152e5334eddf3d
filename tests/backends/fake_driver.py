"""Lists what Triton compiles for a GPU, on a machine without one.

``install`` gives Triton a driver that names a device. Kernels launched on CPU tensors are then
bound and specialised as for that device, and not run: their results are whatever memory holds.
Nor are they compiled, except after ``install_compiler``. Only for a process without
``TRITON_INTERPRET``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grpo_kernels.backends import choice, gpu_tiles, triton_backend
from grpo_kernels.batch import host

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Variant:
    """A kernel, and what a launch has it compiled for."""

    kernel: JITFunction
    signature: dict[str, str]  # argument -> Triton type, or "constexpr"
    constants: dict[str, Any]  # arguments that are known at compile time; None: absent
    attributes: dict[tuple[int, ...], list]  # by place of an argument, what divides it
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def types(self) -> dict[str, str]:
        """Types of the arguments of a launch."""
        return {name: kind for name, kind in self.signature.items() if kind != "constexpr"}

    @property
    def label(self) -> str:
        sizes = ("stride", "num_", "length", "depth")
        types = (f"{x}:{kind}" for x, kind in self.types.items() if not x.startswith(sizes))
        return " ".join([self.name, *types, f"aligned={self.aligned}"])

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The numbers of a tile, without what a kernel is asked to do."""
        constants = ((p.name, self.constants[p.name]) for p in self.kernel.params if p.is_constexpr)
        return tuple((name, x) for name, x in constants if type(x) is int)

    @property
    def aligned(self) -> bool:
        """Whether rows start at a multiple of 16 elements, as in most vocabularies."""
        names = self.kernel.arg_names
        return "stride_row" not in names or bool(self.attributes.get((names.index("stride_row"),)))


Variants = dict[str, Variant]  # by a digest of all that decides what is compiled


class Driver:
    """What a launch asks before it compiles."""

    def __init__(self, target: str = "sm_90") -> None:
        self._target = TARGETS[target]

    def get_current_target(self) -> GPUTarget:
        return self._target

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


def install(target: str = "sm_90") -> Variants:
    """Return the variants that are launched from now on."""
    variants: Variants = {}

    def note(
        function: JITFunction,
        key: str,
        signature: dict[str, str],
        device: int,
        constants: Mapping[tuple[int, ...], Any],
        options: Any,
        attributes: dict[tuple[int, ...], list],
        warmup: bool,
    ) -> None:
        digest = hashlib.sha256(f"{function.cache_key} {key}".encode()).hexdigest()
        variants[digest] = Variant(
            kernel=function,
            signature=signature,
            constants={function.arg_names[place[0]]: x for place, x in constants.items()},
            attributes=attributes,
            options={name: x for name, x in vars(options).items() if name != "arch"},
        )

    JITFunction._do_compile = note  # a launch without a kernel ends there
    driver.set_active(Driver(target))
    pretend(target)
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
    for module in (choice, gpu_tiles, triton_backend):
        module.device_class = lambda device: arch  # type: ignore[attr-defined]
    host.reading_is_free = lambda *_: False  # the host reads no result, as on a GPU


class ZeroedAllocations(TorchDispatchMode):
    """A context in which what kernels do not write is 0: a count, or the end of a loop."""

    _NAMES = ("aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and func._schema.name in self._NAMES:
            out.zero_()
        return out
