"""The Triton backend, and whether Triton can run here. Imports it on first use."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.base import RowStats, StatsGrad, Tile, TileGradient
from grpo_kernels.backends.gpu_tiles import device_class, linear_config, row_config
from grpo_kernels.backends.torch_backend import Backend
from grpo_kernels.head import Head

_OLDEST = (3, 6)  # as in pyproject.toml


def _launcher(name: str) -> Any:
    """Return a method that calls a function of the kernel package, which imports Triton."""

    def launch(self: Backend, *arguments: Any, **named: Any) -> Any:
        room = importlib.import_module("grpo_kernels.backends.triton")
        return getattr(room, name)(*arguments, **named)

    return launch


class Triton(Backend):
    """Kernels for fp32, bf16 and fp16 on a GPU, or interpreted."""

    name, generates, compiles, for_gpus = "triton", True, True, True  # the interpreter is slow
    logp_gradients = (torch.bfloat16,)  # fp16 does not have the range
    absence = "Falling back to pure torch on the GPU, which is slower, because {}."

    stats = _launcher("row_stats")
    dlogits_ = _launcher("dlogits_")
    logp_gradient_ = _launcher("logp_gradient_")
    weighted_gradient = _launcher("weighted_gradient")
    scaled = _launcher("scaled")
    divergence_sums = _launcher("divergence_sums")
    divergence_gradient_ = _launcher("divergence_gradient_")
    linear_stats = _launcher("linear_stats")
    linear_logp_gradient = _launcher("linear_logp_gradient")
    tail_sums = _launcher("tail_sums")
    extract_entries = _launcher("extract_entries")
    entries_matmul = _launcher("entries_matmul")
    entries_transposed_matmul = _launcher("entries_transposed_matmul")

    def chosen_cuts(
        self,
        tile: Tile,
        stats: RowStats,
        grad_stats: StatsGrad | None,
        share: float,
        gradient: TileGradient | None = None,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        of_logp = grad_stats is None or grad_stats.dentropy is None
        if total is not None or not of_logp or tile.transform.softcap is not None:
            return super().chosen_cuts(
                tile=tile,
                stats=stats,
                grad_stats=grad_stats,
                share=share,
                gradient=gradient,
                total=total,
            )
        from grpo_kernels.backends.triton import common_cuts

        dlogp = None if grad_stats is None else grad_stats.dlogp
        return common_cuts(tile=tile, stats=stats, dlogp=dlogp, share=share, gradient=gradient)

    def unavailable(self) -> str | None:
        if (why := _why_not_usable()) is not None:
            return why
        from triton import knobs

        return None if knobs.runtime.interpret else _why_no_driver()

    def unsuited(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            return "the tensors are on the CPU"
        if dtype == torch.float64:
            return "the Triton kernels have no fp64"
        name = device_class(device)
        if dtype == torch.bfloat16 and name.startswith("sm_") and int(name[3:]) < 80:
            # elsewhere it is emulated, slowly
            return f"bf16 needs a device of compute capability 8.0, and this is {name}"
        return None

    def numerics(
        self,
        dtype: torch.dtype,
        head: Head,
        precision: str,
        tiled: bool,
    ) -> list[str]:
        import triton  # the module, since the distribution's name differs between platforms

        tile = row_config(head.weight.device) if tiled else linear_config(dtype, head)
        return [f"triton={triton.__version__}", str(tile)]

    def has_linear_gradient(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        plain = head.bias is None and head.lora is None and head.shard is None
        plain = plain and head.transform.softcap is None and precision == "fp32"
        if not plain or dtype not in self.logp_gradients:
            return False
        # otherwise the library's GEMM, and a kernel that reads its logits, are faster
        return head.weight.device.type == "cpu" or bool(linear_config(dtype, head).descriptors)

    def has_linear_stats(self, dtype: torch.dtype, head: Head, precision: str) -> bool:
        # the library is faster for fp32 inputs; an adapter's update needs a tile
        return head.lora is None and dtype.itemsize == 2


@functools.cache
def _why_not_usable() -> str | None:
    try:
        import triton
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        return "triton is not installed" if absent else f"triton cannot be imported: {error}"
    major, minor, *_ = triton.__version__.split(".")
    if (int(major), int(minor)) >= _OLDEST:
        return None
    return "expected triton {}.{} or newer, got {}".format(*_OLDEST, triton.__version__)


@functools.cache
def _why_no_driver() -> str | None:
    if not torch.cuda.is_available():
        interpreted = "TRITON_INTERPRET=1 runs the kernels on CPU, slowly"
        return f"no CUDA or ROCm device is present ({interpreted})"
    from triton.runtime import driver

    try:
        _ = driver.active
    except Exception as error:  # any kind: Triton for another platform, no C compiler, no libcuda
        return f"triton has no driver for this device: {error}"
    return None
