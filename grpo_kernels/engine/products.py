"""Products of tiles, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends import TileGradient
from grpo_kernels.engine.rows import Selection, ranges
from grpo_kernels.head import accumulate, zero_row_padding

_PRODUCT_ROWS = 2048  # rows of an fp32 product that is rounded: a whole wave of a GPU's tiles


def add_product(
    out: Tensor,  # (M, N)
    a: Tensor,  # (M, K), of the dtype of b
    b: Tensor,  # (K, N)
    *,
    first: bool,
    factor: Tensor | None = None,  # () or (M, 1), fp32 or fp64; None: 1
) -> None:
    """Compute ``out += factor * (a @ b)`` (``=`` if ``first``) with one rounding."""
    if factor is None:
        accumulate(out, a, b, first)
        return
    for rows in ranges(len(out), _PRODUCT_ROWS):
        product = torch.empty_like(out[rows], dtype=factor.dtype)
        accumulate(product, a[rows], b, first=True)
        of_rows = factor[rows] if factor.dim() else factor
        if first:
            torch.mul(product, of_rows, out=out[rows])
        else:
            out[rows].addcmul_(product, of_rows)


def add_to_rows(
    whole: Tensor,  # (all, N)
    gradient: TileGradient,  # (C, n), of the selected rows
    matrix: Tensor,  # (n, N)
    selection: Selection,
    *,
    first: bool,
    scale: Tensor | None = None,  # () factor of the matrix; None: 1
) -> None:
    """Add ``gradient @ matrix``, or set it if ``first``; rows that are not selected get 0."""
    dlogits, factor = gradient
    zero_row_padding(dlogits)
    if factor is not None:
        scale = factor[:, None] if scale is None else factor[:, None] * scale
    if selection.index is None:
        add_product(whole, dlogits, matrix, first=first, factor=scale)
    else:  # such a tile has all columns, so this is the only product
        product = whole.new_empty(len(selection.index), whole.shape[1])
        add_product(product, dlogits, matrix, first=True, factor=scale)
        whole.zero_().index_copy_(0, selection.index, product)


def weighted(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Return (C, n) rows times a (C,) scale (None: 1), rounded once."""
    if scale is None:
        return rows
    product = torch.mul(rows, scale[:, None], out=torch.empty_like(rows))
    return product.masked_fill_((scale == 0)[:, None], 0)  # 0 * NaN would be NaN
