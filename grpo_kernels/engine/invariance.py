"""``batch_invariant`` on a library's GEMM: what it takes for granted is looked at once.

In a tile of a fixed height the library takes the same kernel for every batch. No library says that
this kernel gives a row the same bits wherever it lies: one that deals out parts of K by the place
of a row (stream-K) does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.head import Head, HeadLoRA, project

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_proven: set[tuple[object, ...]] = set()


def prove_same_bits(head: Head, tile: Tensor, precision: str) -> None:
    """Look whether the library gives a row the same bits at every place of ``tile`` (C, V).

    That is done at the first such GEMM of the process: for each device, dtypes of inputs and
    logits, shape, precision and, on a CPU, number of threads. One row in all places has to give
    equal rows, and so has this row amid others. It takes two GEMMs into the tile, which is
    overwritten, a byte for each of its logits, and a wait for the device.

    While a CUDA graph is captured the host cannot look, so nothing is proven: the tile is used as
    it is. A step that runs before it is captured, as torch asks, has proven it by then.

    Raises:
        RuntimeError: the bits differ.
    """
    device, (rows, depth) = tile.device, (tile.shape[0], head.weight.shape[1])
    rank = head.lora.rank if head.lora is not None else None
    threads = torch.get_num_threads() if device.type == "cpu" else None
    dtypes = (head.weight.dtype, tile.dtype)
    case = (device, dtypes, tuple(tile.shape), depth, rank, precision, threads)
    if case in _proven or _is_captured(device):
        return
    generator = torch.Generator(device).manual_seed(0)
    hidden = tile.new_empty((rows, depth), dtype=dtypes[0]).normal_(generator=generator)
    if head.lora is not None:  # the B of a new one is 0, which would show nothing
        head = replace(head, lora=_random(head.lora, generator))
    place = rows // 2 + 1
    bits = tile.view(_BITS[tile.element_size()])
    project(hidden[place].expand_as(hidden).contiguous(), head, tile)
    row = bits[place].clone()
    differ = (bits != row).any(1)
    project(hidden, head, tile)
    differ[place].logical_or_((bits[place] != row).any())
    first, count = host.values(
        host.sync_to_host(torch.stack([differ.int().argmax(), differ.sum()]))
    )
    if count:
        raise RuntimeError(
            "batch_invariant: expected the library's GEMM to give a row the same bits at all "
            f"{rows} places of a tile, got others at {count} of them, first at {first} "
            f"({dtypes[0]} to {dtypes[1]}, V {tile.shape[1]}, D {depth}, {device}, "
            f"precision={precision!r}). Another max_workspace_bytes makes another tile"
        )
    _proven.add(case)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _random(lora: HeadLoRA, generator: torch.Generator) -> HeadLoRA:
    a, b = (torch.empty_like(x).normal_(generator=generator) for x in (lora.a, lora.b))
    return replace(lora, a=a, b=b)
