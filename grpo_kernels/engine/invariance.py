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
    """Check that the library gives a row the same bits at every place of ``tile`` (C, V).

    In a tile of a fixed height it runs the same kernel for every batch. A kernel that splits K by
    the place of a row (stream-K) rounds differently there. The same row in all places has to give
    equal rows, and so has this row among others. The check runs before the first such GEMM of the
    process: two GEMMs into the tile, a byte for each of its logits, and a wait for the device. It
    does not run while a CUDA graph is captured, before which torch asks for a step.

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
    if lora is not None:  # the B of a new one is 0, which would show nothing
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
            f"{rows} places of a tile, got others at {count} of them, first at {first} "
            f"({dtype} to {tile.dtype}, V {columns}, D {depth}, {device}, "
            f"precision={precision!r}). Another max_workspace_bytes makes another tile"
        )
    _proven.add(case)
