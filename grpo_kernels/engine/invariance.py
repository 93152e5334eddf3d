"""``batch_invariant`` with a library's GEMM: checks once that the GEMM is row-invariant."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.head import Head, project

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_proven: set[tuple[object, ...]] = set()


def prove_same_bits(head: Head, tile: Tensor, precision: str) -> None:
    """Check that the library gives a row the same bits at every position in ``tile`` (C, V).

    For tiles of a fixed height the library runs the same kernel in every batch. But a kernel that
    splits K depending on a row's position (stream-K) rounds differently there. The check puts the
    same row at all positions, and once among other rows, and compares the bits. It runs before the
    first such GEMM of the process, and costs two GEMMs into the tile, a byte per logit, and a wait
    for the device. It does not run during CUDA graph capture, before which torch requires an
    ordinary step.

    Raises:
        RuntimeError: the bits differ.
    """
    device, dtype, (rows, columns), lora = tile.device, head.weight.dtype, tile.shape, head.lora
    depth, rank = head.weight.shape[1], None if lora is None else lora.rank
    threads = torch.get_num_threads() if device.type == "cpu" else None
    case = (device, dtype, tile.dtype, rows, columns, depth, rank, precision, threads)
    if case in _proven or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    generator = torch.Generator(device).manual_seed(0)
    hidden = tile.new_empty((rows, depth), dtype=dtype).normal_(generator=generator)
    if lora is not None:  # random factors: a new adapter has B = 0, which would hide differences
        a, b = (torch.empty_like(x).normal_(generator=generator) for x in (lora.a, lora.b))
        head = replace(head, lora=replace(lora, a=a, b=b))
    place = rows // 2 + 1
    bits = tile.view(_BITS[tile.element_size()])
    project(hidden[place].expand_as(hidden).contiguous(), head, tile)
    row = bits[place].clone()
    differ = (bits != row).any(1)
    project(hidden, head, tile)
    differ[place].logical_or_((bits[place] != row).any())
    differing = torch.stack([differ.int().argmax(), differ.sum()])
    first, count = host.values(host.sync_to_host(differing))
    if count:
        raise RuntimeError(
            "batch_invariant: expected the library's GEMM to give a row the same bits at all "
            f"{rows} positions in a tile, got other bits at {count} of them, first at {first} "
            f"({dtype} to {tile.dtype}, V {columns}, D {depth}, {device}, "
            f"precision={precision!r}). Try another max_workspace_bytes, which changes the tile"
        )
    _proven.add(case)
