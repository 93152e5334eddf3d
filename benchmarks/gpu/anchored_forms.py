"""Forms of the anchored GEMM: E = bf16(exp2(f2 * x W^T - a2)) with its rows' sums, in one kernel.

``f2`` is a row's temperature factor times log2 e, ``a2`` its anchor: ``f2`` times about the
target's logit. With ``t = f2 * logit - a2`` a row has ``S = sum 2**t``, ``M = sum t * 2**t`` and
``y``, the target's logit, so that in nats

    logp = (f2 * y - a2) * ln 2 - log S        entropy = log S - ln 2 * M / S

and ``E / S`` is the softmax. ``FORMS`` are those worth measuring on a Hopper GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.gpu.anchored_kernels import anchor_kernel, anchored_kernel, persistent_kernel


@dataclass(frozen=True)
class Config:
    """A form of the kernel."""

    block_t: int = 128
    block_v: int = 256
    block_d: int = 64
    num_warps: int = 8
    num_stages: int = 3
    sub: int = 1  # parts of a tile that the epilogue takes one after the other, 1 or 2
    tiles: int = 8  # of a split: columns that one program keeps sums of
    group: int = 16  # row blocks that run side by side
    flat: bool = False  # the next tile's loads start during the epilogue
    persistent: bool = False  # one program per multiprocessor, sums of every tile
    fuse: bool = True  # a * b + c rounds once

    @property
    def split_columns(self) -> int:
        return self.block_v * (1 if self.persistent else self.tiles)

    @property
    def options(self) -> dict[str, Any]:
        fusion = {"enable_fp_fusion": self.fuse}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **fusion}

    @property
    def constants(self) -> dict[str, Any]:
        constants = {
            "BLOCK_T": self.block_t,
            "BLOCK_V": self.block_v,
            "BLOCK_D": self.block_d,
            "GROUP": self.group,
            "SUB": self.sub,
            "FLAT": self.flat,
            "UPCAST": bool(knobs.runtime.interpret),
        }
        return constants if self.persistent else {**constants, "TILES": self.tiles}

    def tiny(self) -> Config:
        """Return the same form for the interpreter."""
        return replace(self, block_t=16, block_v=64, block_d=32, tiles=2, group=2)


class Form(NamedTuple):
    """A configuration, and whether E is stored: without, only statistics are left."""

    config: Config
    store: bool = True


_WIDE = Config(sub=2)  # two stores of half a tile: less shared memory
BASE = "base"
FORMS: dict[str, Form] = {
    BASE: Form(Config()),
    "without store": Form(Config(), store=False),
    "sub 2": Form(_WIDE),
    "sub 2, without store": Form(_WIDE, store=False),
    "sub 2, 4 stages": Form(replace(_WIDE, num_stages=4)),
    "flat": Form(Config(flat=True)),
    "flat, sub 2": Form(replace(_WIDE, flat=True)),
    "persistent": Form(replace(_WIDE, persistent=True, group=8)),
    "persistent, flat": Form(replace(_WIDE, persistent=True, flat=True, group=8)),
    "persistent, flat, group 16": Form(replace(_WIDE, persistent=True, flat=True)),
    "tiles 4": Form(Config(tiles=4)),
    "tiles 16": Form(Config(tiles=16)),
    "group 8": Form(Config(group=8)),
    "group 32": Form(Config(group=32)),
    "group 64": Form(Config(group=64)),
    "not fused": Form(Config(fuse=False)),
    "128x128, 4 stages": Form(Config(block_v=128, num_stages=4, tiles=16)),
    "128x128, persistent, flat": Form(
        Config(block_v=128, num_stages=4, persistent=True, flat=True)
    ),
    "256x128": Form(Config(block_t=256, block_v=128, tiles=16, group=8)),
}


def leading_dim(columns: int) -> int:
    """Return the elements from one row of E to the next: the copy engine needs 16 bytes."""
    return -(-columns // 64) * 64


def num_programs(device: torch.device) -> int:
    """Return how many programs of the persistent form run at once."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def _described(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns])


class Step(NamedTuple):
    """Buffers of a launch; every field that a kernel fills is uninitialised at first."""

    hidden: Tensor  # (T, D) bf16, contiguous
    weight: Tensor  # (V, D) bf16, contiguous
    target: Tensor  # (T,) int64
    e: Tensor | None  # (T, V) bf16, rows of ``leading_dim``
    f2: Tensor  # (T,) fp32
    a2: Tensor  # (T,) fp32
    y_target: Tensor  # (T,) fp32
    sums: Tensor  # (2, splits, T) fp32
    config: Config

    def poison(self) -> None:
        """Fill everything with NaN that the kernels have to write."""
        for x in (self.e, self.f2, self.a2, self.y_target, self.sums):
            if x is not None:
                x.fill_(float("nan"))

    def set_anchor(self, temperature_factor: float | Tensor = 1.0) -> None:
        """Fill ``f2`` and ``a2``; the factor multiplies logits: 1 over the temperature."""
        rows, depth = self.hidden.shape
        factors = temperature_factor if isinstance(temperature_factor, Tensor) else None
        anchor_kernel[(triton.cdiv(rows, 4),)](
            self.hidden,
            self.weight,
            self.target,
            factors,
            1.0 if factors is not None else float(temperature_factor),
            self.f2,
            self.a2,
            rows,
            depth,
            BLOCK_T=4,
            BLOCK_D=256,
            num_warps=4,
        )

    def arguments(self) -> tuple[Any, tuple[int], tuple[Any, ...]]:
        """Return the kernel, its grid and what it is called with."""
        config, (rows, depth), columns = self.config, self.hidden.shape, len(self.weight)
        wide = config.block_v // config.sub
        splits, blocks = self.sums.shape[1], triton.cdiv(rows, config.block_t)
        arguments = (
            _described(self.hidden, config.block_t, config.block_d),
            _described(self.weight, config.block_v, config.block_d),
            None if self.e is None else _described(self.e, config.block_t, wide),
            self.f2,
            self.a2,
            self.target,
            self.y_target,
            self.sums,
            *(rows, columns, depth, splits),
        )
        if config.persistent:
            grid = min(num_programs(self.hidden.device), blocks * splits)
            return persistent_kernel, (grid,), arguments
        return anchored_kernel, (blocks * splits,), arguments

    def multiply(self) -> Any:
        """Launch the GEMM; ``f2`` and ``a2`` have to be there."""
        kernel, grid, arguments = self.arguments()
        return kernel[grid](*arguments, **self.config.constants, **self.config.options)

    def merged(self) -> tuple[Tensor, Tensor]:
        """Return S and M, (T,) fp64."""
        total, moment = self.sums.sum(1, dtype=torch.float64)
        return total, moment


def prepare(
    hidden: Tensor, weight: Tensor, target: Tensor, config: Config, store: bool = True
) -> Step:
    """Allocate for :func:`anchored`."""
    assert hidden.dtype == weight.dtype == torch.bfloat16, (hidden.dtype, weight.dtype)
    assert hidden.is_contiguous() and weight.is_contiguous(), "rows side by side"
    assert hidden.shape[1] == weight.shape[1] and hidden.shape[1] % 8 == 0, hidden.shape
    assert config.persistent or config.tiles, config
    rows, columns = len(hidden), len(weight)
    e = None
    if store:
        e = hidden.new_empty(rows, leading_dim(columns))[:, :columns]
    splits = triton.cdiv(columns, config.split_columns)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device)

    vectors = empty(rows), empty(rows), empty(rows)
    sums = empty(2, splits, rows)
    return Step(hidden, weight, target.contiguous(), e, *vectors, sums, config)
