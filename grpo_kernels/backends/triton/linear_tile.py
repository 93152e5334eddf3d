"""Shared by kernels with a tile of logits in their epilogue: the product and its arguments.

A program owns a block of rows and a split of the vocabulary, and multiplies one tile of it after
another.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.backends.gpu_tiles import LinearConfig, row_stride
from grpo_kernels.head import Head


@triton.jit
def block_and_split(num_rows, num_splits, BLOCK_T: tl.constexpr, GROUP: tl.constexpr):
    """Return this program's first row and its split; ``GROUP`` row blocks run side by side."""
    program = tl.program_id(0)
    num_blocks = tl.cdiv(num_rows, BLOCK_T)
    first_block = program // (GROUP * num_splits) * GROUP
    group = tl.minimum(num_blocks - first_block, GROUP)
    within = program % (GROUP * num_splits)
    return (first_block + within % group) * BLOCK_T, within // group


@triton.jit
def logits_tile(
    x_ptr, weight_ptr, first_row, first_column, num_rows, num_columns, depth, stride_wv,
    DESCRIPTORS: tl.constexpr, EVEN_D: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows with a block of the vocabulary; return fp32 logits."""
    rows, columns = first_row + tl.arange(0, BLOCK_T), first_column + tl.arange(0, BLOCK_V)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_T, BLOCK_V), tl.float32)
    for start in tl.range(0, depth, BLOCK_D):
        if DESCRIPTORS:  # zeros beyond the ends
            x = x_ptr.load([first_row, start])
            w = weight_ptr.load([first_column, start])
        else:
            x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * depth + (start + offs_d)[None, :]
            w_ptrs = weight_ptr + columns.to(tl.int64)[:, None] * stride_wv
            w_ptrs += (start + offs_d)[None, :]
            mask_x = (rows < num_rows)[:, None]
            mask_w = (columns < num_columns)[:, None]
            if not EVEN_D:
                mask_d = (start + offs_d < depth)[None, :]
                mask_x = mask_x & mask_d
                mask_w = mask_w & mask_d
            x = tl.load(x_ptrs, mask=mask_x, other=0.0)
            w = tl.load(w_ptrs, mask=mask_w, other=0.0)
        if UPCAST:  # Triton's interpreter multiplies bf16 incorrectly
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


def operands(hidden: Tensor, head: Head, target: Tensor) -> tuple[Tensor, Head, Tensor]:
    """Return the arguments of :func:`linear_stats` with rows as kernels read them."""
    weight = head.weight.to(hidden.dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    bias = head.bias.contiguous() if head.bias is not None else None
    if not hidden.is_contiguous() or hidden.data_ptr() % 16:
        # which kernel runs on a row must not depend on where in memory its batch lies
        hidden = hidden.clone(memory_format=torch.contiguous_format)
    return hidden, replace(head, weight=weight, bias=bias), target.contiguous()


def described(x: Tensor, rows: int, config: LinearConfig, columns: int | None = None) -> Any:
    """Return a matrix as kernels need it, with this many rows and columns per tile."""
    if not config.descriptors:
        return x
    stride = row_stride(x)
    stride += -stride % (16 // x.element_size())  # for a single row; the stride is unused
    block = [rows, columns or config.block_d]
    return TensorDescriptor(x, list(x.shape), [stride, 1], block)


def constants(config: LinearConfig, depth: int) -> dict[str, object]:
    """Return the constants of all kernels with a tile of a product."""
    return {
        "DESCRIPTORS": config.descriptors,
        "EVEN_D": depth % config.block_d == 0,
        "UPCAST": knobs.runtime.interpret,
        "BLOCK_T": config.block_t,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "TILES": config.tiles,
        "GROUP": config.group,
        **config.options,
    }
