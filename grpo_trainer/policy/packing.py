"""Packs rows of a micro-batch without padding, one after another, with positions that restart.

transformers infers from the positions which tokens see each other: it builds a (W, W) mask for
each row, or, for flash attention, the lengths of the sequences in a single row.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
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
from grpo_trainer.data import Divisors, MicroBatch, Sample, collate, padded_length
from grpo_trainer.policy.forward import evaluating, run
from grpo_trainer.policy.load import MISMATCH
from grpo_trainer.policy.prefixes import Prefixes

logger = logging.getLogger(__name__)

# a model, and a context manager that yields the module to call
Runs: TypeAlias = tuple[PreTrainedModel, AbstractContextManager[nn.Module]]

_LENGTHS = (13, 5, 16, 1, 7)  # of the test rows
_SHARE = 0.25  # allowed error, relative to the change if rows see each other
# types of layers that separate rows by their positions
_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Packs micro-batches: a column."""

    one_row: bool = False  # for flash attention
    always: bool = False  # also if no tokens are saved
    multiple: int | None = None  # a packed row's width is a multiple of it
    shares: bool = False  # whether models accept our own masks
    # how many pairs of tokens cost as much as one token: 6 hidden sizes, by section 3 of
    # arXiv:2104.04473, where attention needs 4 operations times the hidden size per pair
    pairs_per_token: int = 6

    def __call__(self, batch: MicroBatch, policy: nn.Module) -> None:
        if batch.inputs:
            return
        (count, width), device = batch.input_ids.shape, batch.input_ids.device
        lengths = batch.attention_mask.sum(1).tolist()
        if self.shares:
            ids = batch.input_ids.tolist()
            rows = [row[:length] for row, length in zip(ids, lengths, strict=True)]
            prefixes = Prefixes.of(rows).largest_first()
            if runs := self.shared(prefixes, width):
                units = [prefixes.elements(run, width) for run in runs]
                batch.packed = _placed(units, count * width, multiple=self.multiple).to(device)
                batch.owners = prefixes.owners(runs, width).to(device)
                return
        packed = packed_rows(lengths, width, self.one_row, self.multiple)
        if packed.numel() < batch.input_ids.numel() or self.always:
            batch.packed = packed.to(device)

    def shared(self, prefixes: Prefixes, width: int) -> list[range] | None:
        """Return the runs of rows that are computed together, with shared prefixes only once; None
        if that saves nothing, or needs larger masks than padded rows.
        """
        if not self.shares or not any(prefixes.common):
            return None
        count, most = len(prefixes.rows), float(sum(prefixes.lengths))
        while True:
            runs = prefixes.runs(1 / self.pairs_per_token, most)
            together = self.shape([prefixes.tokens(run) for run in runs])
            if together[0] * together[1] ** 2 <= count * width**2:
                break
            if most == width:
                return None  # because of padding to a multiple
            most = max(most / 2, width)
        apart = self.shape(prefixes.lengths)
        saves = math.prod(together) < math.prod(apart) and self._cost(together) < self._cost(apart)
        return runs if saves else None

    def shape(self, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the shape of the packed rows for units of these sizes, in tokens."""
        dealt = _best_dealt(sizes, self.one_row)
        return len(dealt), padded_length([total for total, _, _ in dealt], self.multiple)

    def _cost(self, shape: tuple[int, int]) -> float:
        count, width = shape
        return count * width * (1 + width / self.pairs_per_token)


def make_pack(
    args: GRPOConfig, models: Sequence[Runs], images: bool, routers: bool = False
) -> Packing | None:
    """Return the Packing for all ``models``, according to ``args.packing``; None if rows stay
    padded.

    Rows with ``images`` stay padded: images belong to rows in order. Shared prefixes are computed
    once if the models accept our own masks, except with a loss of ``routers``, which counts every
    token.

    Raises:
        ValueError: ``packing`` is ``packed``, but something needs padded rows.
    """
    if args.packing == "padded":
        return None
    multiple = args.pad_to_multiple_of
    assert not isinstance(multiple, str)  # auto was replaced on construction
    config = models[0][0].config
    one_row = is_flash_attention_requested(config)
    verdicts = [_try_both(args, *runs, one_row) for runs in models]
    needed = next((why for why, _ in verdicts if why), None)
    reason = needed or ("images" if images else None)
    if reason:
        if args.packing == "packed":
            raise ValueError(f"packing: expected 'auto' or 'padded' with {reason}; got 'packed'")
        logger.warning("packing: rows are padded because of %s", reason)
    if needed:
        return None
    return Packing(
        one_row=one_row,
        always=args.packing == "packed",
        multiple=multiple,
        shares=not routers and all(once for _, once in verdicts),
        pairs_per_token=6 * config.get_text_config().hidden_size,
    )


def packed_rows(
    lengths: Sequence[int], width: int, one_row: bool = False, multiple: int | None = None
) -> Tensor:  # (R, W) int64
    """Return the places of the elements of padded rows, (B, ``width``), without padding.

    The index ``B * width`` marks padding. With dense masks, attention costs the square of a row's
    width, so the number of rows minimizes ``R * W**2``, which never exceeds the cost of padded
    rows. With ``one_row`` there is one row.
    """
    starts = range(0, len(lengths) * width, width)
    parts = zip(starts, lengths, strict=True)
    units = [torch.arange(start, start + length) for start, length in parts]
    return _placed(units, len(lengths) * width, one_row, multiple)


def _placed(
    units: Sequence[Tensor], fill: int, one_row: bool = False, multiple: int | None = None
) -> Tensor:  # (R, W) int64
    """Place units one after another, each within one row; pad with ``fill``."""
    dealt = _best_dealt([len(unit) for unit in units], one_row)
    width = padded_length([total for total, _, _ in dealt], multiple)
    packed = torch.full((len(dealt), width), fill)
    for place, (total, _, chosen) in zip(packed, dealt, strict=True):
        place[:total] = torch.cat([units[unit] for unit in chosen])
    return packed


def _best_dealt(sizes: Sequence[int], one_row: bool) -> list[tuple[int, int, list[int]]]:
    """Distribute units over the number of rows that minimizes the area of their masks."""
    if one_row:
        return _dealt(sizes, 1)
    longest, total = max(sizes), sum(sizes)

    def at_least(count: int) -> int:
        return count * max(longest, -(-total // count)) ** 2

    best: tuple[float, int, list[tuple[int, int, list[int]]]] = (math.inf, 0, [])
    for count in sorted(range(1, len(sizes) + 1), key=at_least):
        if at_least(count) > best[0]:
            break
        dealt = _dealt(sizes, count)
        best = min(best, (count * max(dealt)[0] ** 2, count, dealt))
    return best[2]


def _dealt(sizes: Sequence[int], count: int) -> list[tuple[int, int, list[int]]]:
    """Distribute units, longest first, each to the shortest row: (length, number, units)."""
    heap: list[tuple[int, int, list[int]]] = [(0, number, []) for number in range(count)]
    for unit in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        total, number, chosen = heap[0]
        chosen.append(unit)
        heapreplace(heap, (total + sizes[unit], number, chosen))
    return heap


def _try_both(
    args: GRPOConfig, model: PreTrainedModel, runs: AbstractContextManager[nn.Module], one_row: bool
) -> tuple[str | None, bool]:
    """Test a few rows both ways. Return what needs padded rows and why, or None, and whether rows
    may share prefixes."""
    name = type(model).__name__
    if args.neftune_noise_alpha is not None:
        return "neftune_noise_alpha, because its noise depends on the width of rows", False
    if model._is_stateful:
        return f"{name}, because its layers carry state from one row to the next", False
    if is_flash_attention_requested(model.config) != one_row:
        attention = model.config._attn_implementation
        return f"{name}, because its attention ({attention}) differs from the policy's", False
    if not _only_attention(model):
        return f"{name}, because layers other than attention mix tokens across rows", False
    batch = _tried(model)
    width, device = max(_LENGTHS), batch.input_ids.device
    packed = packed_rows(_LENGTHS, width, one_row).to(device)
    rows = zip(batch.input_ids.tolist(), _LENGTHS, strict=True)
    prefixes = Prefixes.of([row[:length] for row, length in rows])
    everything = range(len(_LENGTHS))
    once = replace(
        batch,
        packed=prefixes.elements(everything, width)[None].to(device),
        owners=prefixes.owners([everything], width).to(device),
    )
    ids = batch.input_ids[batch.attention_mask.bool()][None]  # rows that see each other
    joined = replace(batch, input_ids=ids, attention_mask=torch.ones_like(ids))
    with runs as called, evaluating(called):
        padded, mixed = _hidden(called, batch), _hidden(called, joined)
        try:
            hidden = _hidden(called, replace(batch, packed=packed))
            shared = None
            if _takes_masks(model):
                shared = _hidden(called, once)
        except torch.OutOfMemoryError:
            raise
        except MISMATCH as error:
            return f"{name}, which fails without padding: {type(error).__name__}: {error}", False

    def error_of(x: Tensor) -> float:
        return float((x - padded).abs().max() / padded.abs().max())

    allowed = min(TOLERANCE[padded.dtype], _SHARE * error_of(mixed))
    if (wrong := error_of(hidden)) > allowed:
        why = f"expected errors of hidden states of at most {allowed:.1e}, got {wrong:.1e}"
        return f"{name}, because its positions do not separate rows: {why}", False
    return None, shared is not None and error_of(shared) <= allowed


def _only_attention(model: PreTrainedModel) -> bool:
    """Return whether only attention, which separates rows by their positions, mixes tokens.

    A convolution or a recurrence mixes rows, with an error that may be as small as rounding.
    """
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    convolves = any(isinstance(module, nn.Conv1d) for module in model.modules())
    return not convolves and {*(kinds or _ATTENTION)} <= _ATTENTION


def _takes_masks(model: PreTrainedModel) -> bool:
    """Return whether only a mask decides which tokens see each other: sdpa, layers without
    windows."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or ["full_attention"])}
    windows = ("sliding_window", "attention_chunk_size")
    whole = kinds == {"full_attention"} and not any(getattr(config, x, None) for x in windows)
    return whole and config._attn_implementation == "sdpa"


def _hidden(model: nn.Module, batch: MicroBatch) -> Tensor:  # (N, D)
    kept: list[Tensor] = []

    def keep(hidden: Tensor, head: Head) -> Tensor:
        kept.append(hidden[batch.attention_mask.bool()])
        return hidden[..., :1]

    run(model, batch, keep)
    return kept[0]


def _tried(model: PreTrainedModel) -> MicroBatch:
    """Return rows of text tokens with different lengths and a common prefix."""
    configs = [model.config.to_dict(), model.config.get_text_config().to_dict()]
    special = [config[name] for config in configs for name in config if "_token_i" in name]
    words = [i for i in range(min(64, configs[1]["vocab_size"])) if i not in special]
    prompt, more = words[:5], cycle(words)
    rows = [
        Sample("", prompt[:length], completion_ids=[*islice(more, max(length - 5, 0))])
        for length in _LENGTHS
    ]
    one = torch.ones((), device=next(model.get_input_embeddings().parameters()).device)
    return collate(rows, one.expand(len(rows)), Divisors(one, one), pad_token_id=0)
