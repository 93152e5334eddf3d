"""Rows of a micro-batch without their padding: one behind the other, with positions that restart.

transformers reads from the positions which tokens see each other: it makes a mask of (W, W) for
each row, or, for flash attention, lengths of what one row holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from heapq import heapreplace
from itertools import cycle, islice
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import is_flash_attention_requested

from grpo_kernels.head import Head
from grpo_kernels.hf import TOLERANCE
from grpo_trainer.config import GRPOConfig
from grpo_trainer.data import MicroBatch, Sample, collate
from grpo_trainer.policy.forward import evaluating, run
from grpo_trainer.policy.load import MISMATCH

logger = logging.getLogger(__name__)

Pack: TypeAlias = Callable[[MicroBatch], Tensor | None]  # gives a batch's ``packed``
# a model, and what enters the one that is called to run it
Runs: TypeAlias = tuple[PreTrainedModel, AbstractContextManager[nn.Module]]

_LENGTHS = (13, 5, 16, 1, 7)  # of the rows that are tried
_SHARE = 0.25  # of what changes if rows see each other


def make_pack(args: GRPOConfig, models: Sequence[Runs], images: bool) -> Pack:
    """Return what packs micro-batches for all ``models``, as ``args.packing`` says.

    Those with ``images`` stay padded: images belong to rows in their order.

    Raises:
        ValueError: ``packing`` is ``packed``, and something needs padded rows.
    """
    if args.packing == "padded":
        return lambda batch: None
    multiple, always = args.pad_to_multiple_of, args.packing == "packed"
    assert not isinstance(multiple, str)  # on construction auto became a number or None
    one_row = is_flash_attention_requested(models[0][0].config)
    found = [_why_padded(args, *runs, one_row) for runs in models]
    reason = next(filter(None, found), "images" if images else None)
    if reason and always:
        raise ValueError(f"packing: expected 'auto' or 'padded' with {reason}; got 'packed'")
    if reason:
        logger.warning("packing: rows are padded with %s", reason)
    if any(found):
        return lambda batch: None

    def pack(batch: MicroBatch) -> Tensor | None:
        if batch.inputs:
            return None
        ids, lengths = batch.input_ids, batch.attention_mask.sum(1).tolist()
        packed = packed_rows(lengths, ids.shape[1], one_row, multiple)
        return packed.to(ids.device) if packed.numel() < ids.numel() or always else None

    return pack


def packed_rows(
    lengths: Sequence[int], width: int, one_row: bool = False, multiple: int | None = None
) -> Tensor:  # (R, W) int64
    """Return which elements of padded rows, (B, ``width``), stand where without padding.

    What fills up a row is ``B * width``. Where masks are dense, attention takes the square of a
    row's width: rows are as many as make ``R * W**2`` least, which is no more than padded ones
    take. With ``one_row`` there is one.
    """
    counts = [1] if one_row else range(1, len(lengths) + 1)
    dealt = min((_dealt(lengths, count) for count in counts), key=lambda x: len(x) * max(x)[0] ** 2)
    most = max(dealt)[0]
    packed = torch.full((len(dealt), most + -most % (multiple or 1)), len(lengths) * width)
    for place, (total, _, rows) in zip(packed, dealt, strict=True):
        parts = [torch.arange(row * width, row * width + lengths[row]) for row in rows]
        place[:total] = torch.cat(parts)
    return packed


def _dealt(lengths: Sequence[int], count: int) -> list[tuple[int, int, list[int]]]:
    """Deal rows, the longest first, each to what is shortest: its length, its number, its rows."""
    heap: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        total, number, rows = heap[0]
        heapreplace(heap, (total + lengths[row], number, [*rows, row]))
    return heap


def _why_padded(
    args: GRPOConfig, model: PreTrainedModel, runs: AbstractContextManager[nn.Module], one_row: bool
) -> str | None:
    """Return what needs padded rows and why, or None: a few rows are tried both ways."""
    name = type(model).__name__
    if args.neftune_noise_alpha is not None:
        return "neftune_noise_alpha, whose noise depends on the width of rows"
    if model._is_stateful:
        return f"{name}, whose layers carry a state from one row on to the next"
    if is_flash_attention_requested(model.config) != one_row:
        return f"{name}, whose attention ({model.config._attn_implementation}) is not the policy's"
    batch = _tried(model)
    packed = packed_rows(_LENGTHS, max(_LENGTHS), one_row).to(batch.input_ids.device)
    ids = batch.input_ids[batch.attention_mask.bool()][None]  # rows that see each other
    joined = replace(batch, input_ids=ids, attention_mask=torch.ones_like(ids))
    with runs as called, evaluating(called):
        padded, mixed = _hidden(called, batch), _hidden(called, joined)
        try:
            hidden = _hidden(called, replace(batch, packed=packed))
        except torch.OutOfMemoryError:
            raise
        except MISMATCH as error:
            return f"{name}, which fails without padding: {type(error).__name__}: {error}"
    largest = padded.abs().max().float()
    wrong, apart = (float((x - padded).abs().max() / largest) for x in (hidden, mixed))
    allowed = min(TOLERANCE[padded.dtype], _SHARE * apart)
    if wrong <= allowed:
        return None
    found = f"expected errors of hidden states of at most {allowed:.1e}, got {wrong:.1e}"
    return f"{name}, whose positions do not keep rows apart: {found}"


def _hidden(model: nn.Module, batch: MicroBatch) -> Tensor:  # (N, D)
    kept: list[Tensor] = []

    def keep(hidden: Tensor, head: Head) -> Tensor:
        kept.append(hidden[batch.attention_mask.bool()])
        return hidden[..., :1]

    run(model, batch, keep)
    return kept[0]


def _tried(model: PreTrainedModel) -> MicroBatch:
    """Return rows of different lengths, of tokens that stand for text."""
    configs = [model.config.to_dict(), model.config.get_text_config().to_dict()]
    special = [config[name] for config in configs for name in config if "_token_i" in name]
    words = cycle(i for i in range(min(64, configs[1]["vocab_size"])) if i not in special)
    rows = [Sample("", [*islice(words, length)]) for length in _LENGTHS]
    one = torch.ones((), device=model.get_input_embeddings().weight.device)
    return collate(rows, one.expand(len(rows)), one, one, pad_token_id=0)
