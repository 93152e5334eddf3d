"""TokenBatch: the tokens that carry a loss, packed, with everything known before the forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

IGNORE_INDEX = -100

_LOGPROB_FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs")


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Valid completion tokens of B sequences, packed to T rows. Build it with the class methods.

    Masked tokens (prompt, padding, tool results) are not in it: they cost nothing downstream and
    cannot influence another token. ``rows`` says where in the caller's layout each token stood.
    """

    target: Tensor  # (T,) int64
    advantages: Tensor  # (T,) fp32 (fp64 if given so)
    cu_seqlens: Tensor  # (B + 1,) int64, offsets of the sequences; a sequence may be empty
    lengths: tuple[int, ...]  # (B,) the same, as host integers
    rows: Tensor | None = None  # (T,) int64 positions in the caller's flattened layout; None: all
    layout: tuple[int, ...] = ()  # the caller's layout, (B, L) or (T0,)
    max_target: int = 0  # the largest target, so that a vocabulary can be checked without a sync
    old_logprobs: Tensor | None = None  # (T,) when the rollout batch was started
    ref_logprobs: Tensor | None = None  # (T,) of the reference model
    rollout_logprobs: Tensor | None = None  # (T,) reported by the rollout engine; NaN: unknown
    num_items_in_batch: Tensor | float | None = None
    gradient_accumulation_steps: int = 1

    @classmethod
    def from_padded(
        cls,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        *,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> TokenBatch:
        """From padded sequences.

        Args:
            target: (B, L) int64 token ids; -100 marks a token without loss.
            advantages: (B,) one per sequence, or (B, L) one per token; finite.
            mask: (B, L) bool or 0/1, 1 where the token counts. Default: where target is not -100.
            old_logprobs, ref_logprobs, rollout_logprobs: (B, L) or None.
            num_items_in_batch: what the token-sum losses (dapo, cispo, vespo) divide by: valid
                tokens of the accumulation window, per data-parallel process. None: the valid tokens
                here times ``gradient_accumulation_steps``.
            gradient_accumulation_steps: micro-batches per optimizer step.

        Raises:
            ValueError: a shape, dtype, device or value is wrong; the message names the argument.
        """
        _check_target(target, 2, "(B, L)")
        sequences, length = target.shape
        starts = torch.arange(sequences + 1, device=target.device) * length
        extras = dict(
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=rollout_logprobs,
        )
        return _pack(
            cls, target, advantages, mask, starts, extras, num_items_in_batch,
            gradient_accumulation_steps,
        )  # fmt: skip

    @classmethod
    def from_packed(
        cls,
        target: Tensor,
        advantages: Tensor,
        cu_seqlens: Tensor,
        mask: Tensor | None = None,
        *,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        num_items_in_batch: Tensor | float | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> TokenBatch:
        """From packed sequences: ``target`` (T,), ``cu_seqlens`` (B + 1,) from 0 to T.

        ``advantages`` is (B,) or (T,), the log-probabilities and ``mask`` are (T,); the rest is as
        in :meth:`from_padded`. (If B equals T, ``advantages`` is read per token.)
        """
        _check_target(target, 1, "(T,)")
        _check_cu_seqlens(cu_seqlens, target)
        extras = dict(
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            rollout_logprobs=rollout_logprobs,
        )
        return _pack(
            cls, target, advantages, mask, cu_seqlens.long(), extras, num_items_in_batch,
            gradient_accumulation_steps,
        )  # fmt: skip

    @property
    def num_tokens(self) -> int:
        return self.target.numel()

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def sequence_ids(self) -> Tensor:
        """(T,) index of each token's sequence."""
        counts = self.cu_seqlens.diff()
        return torch.repeat_interleave(counts, output_size=self.num_tokens)

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sums of ``values`` (T,) over each sequence, (B,).

        Accumulated in fp64 and in token order, so the result is the same in any batch.
        """
        sums = torch.segment_reduce(
            values.double(), "sum", lengths=self.cu_seqlens.diff(), unsafe=True, initial=0
        )
        return sums.to(values.dtype)

    def segment_mean(self, values: Tensor) -> Tensor:
        """Means of ``values`` (T,) over each sequence, (B,); 0 for an empty one."""
        return self.segment_sum(values) / self.cu_seqlens.diff().clamp(min=1)

    def expand(self, values: Tensor) -> Tensor:
        """Gives each token its sequence's value: (B,) to (T,)."""
        return values[self.sequence_ids]

    def narrow(self, start: int, stop: int) -> TokenBatch:
        """Tokens start..stop; sequences cut by the borders keep the part that lies inside."""
        cut = slice(start, stop)
        lengths, offset = [], 0
        for length in self.lengths:
            lengths.append(max(0, min(stop, offset + length) - max(start, offset)))
            offset += length
        return self._take(cut, self.cu_seqlens.clamp(start, stop) - start, tuple(lengths))

    def select(self, keep: Tensor) -> TokenBatch:
        """The tokens of the int64 index ``keep`` (ascending), in the same B sequences."""
        kept = torch.zeros_like(self.target).index_fill_(0, keep, 1)
        counts = torch.segment_reduce(
            kept.double(), "sum", lengths=self.cu_seqlens.diff(), unsafe=True, initial=0
        ).long()
        cu_seqlens = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return self._take(keep, cu_seqlens, tuple(counts.tolist()))

    def scatter(self, values: Tensor) -> Tensor:
        """Puts per-token ``values`` (T,) back into the caller's layout, 0 elsewhere."""
        if self.rows is None:
            return values.reshape(self.layout)
        flat = values.new_zeros(_numel(self.layout))
        return flat.index_copy(0, self.rows, values).reshape(self.layout)

    def _take(
        self, index: slice | Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]
    ) -> TokenBatch:
        fields = {name: getattr(self, name) for name in _LOGPROB_FIELDS}
        return replace(
            self,
            target=self.target[index],
            advantages=self.advantages[index],
            rows=self.rows[index] if self.rows is not None else None,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            **{name: value[index] for name, value in fields.items() if value is not None},
        )


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _pack(
    cls: type[TokenBatch],
    target: Tensor,
    advantages: Tensor,
    mask: Tensor | None,
    starts: Tensor,  # (B + 1,) offsets in the caller's flattened layout
    extras: Mapping[str, Tensor | None],
    num_items_in_batch: Tensor | float | None,
    gradient_accumulation_steps: int,
) -> TokenBatch:
    """Drops the masked tokens; one host transfer fetches every count that Python needs."""
    if not isinstance(gradient_accumulation_steps, int) or gradient_accumulation_steps < 1:
        raise ValueError(
            "gradient_accumulation_steps: expected an int >= 1, "
            f"got {gradient_accumulation_steps!r}"
        )
    mask = _valid_mask(target, mask)
    advantages = _token_advantages(advantages, target, starts)
    extras = {name: _token_values(name, value, target) for name, value in extras.items()}
    counts = torch.segment_reduce(
        mask.reshape(-1).double(), "sum", lengths=starts.diff(), unsafe=True, initial=0
    ).long()
    flags = _value_flags(target, mask, advantages, extras, num_items_in_batch)
    low, high, bad_advantage, bad_old, bad_ref, bad_items, *lengths = torch.cat(
        [flags, counts]
    ).tolist()
    _raise_on_flags(low, bad_advantage, bad_old, bad_ref, bad_items, num_items_in_batch)
    total = sum(lengths)
    flat = mask.reshape(-1)
    keep = None
    if total < flat.numel():
        keep = torch.argsort(~flat, stable=True)[:total]  # a nonzero() that needs no host sync
    take = (lambda x: x.reshape(-1)) if keep is None else (lambda x: x.reshape(-1)[keep])
    return cls(
        target=take(target),
        advantages=take(advantages),
        cu_seqlens=torch.cat([counts.new_zeros(1), counts.cumsum(0)]),
        lengths=tuple(lengths),
        rows=keep,
        layout=tuple(target.shape),
        max_target=high,
        num_items_in_batch=num_items_in_batch,
        gradient_accumulation_steps=gradient_accumulation_steps,
        **{name: take(value) if value is not None else None for name, value in extras.items()},
    )


def _check_target(target: Tensor, dim: int, shape: str) -> None:
    if not isinstance(target, Tensor) or target.dim() != dim:
        got = tuple(target.shape) if isinstance(target, Tensor) else type(target).__name__
        raise ValueError(f"target: expected a {shape} tensor of token ids, got {got}")
    if target.dtype != torch.int64:
        raise ValueError(f"target: expected dtype torch.int64, got {target.dtype}")


def _check_cu_seqlens(cu_seqlens: Tensor, target: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        got = tuple(cu_seqlens.shape) if isinstance(cu_seqlens, Tensor) else cu_seqlens
        raise ValueError(f"cu_seqlens: expected a (B + 1,) integer tensor, B >= 1, got {got!r}")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"cu_seqlens: expected int32 or int64, got {cu_seqlens.dtype}")
    _check_device("cu_seqlens", cu_seqlens, target)
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != target.numel() or offsets != sorted(offsets):
        raise ValueError(
            f"cu_seqlens: expected offsets rising from 0 to T = {target.numel()}, got {offsets}"
        )


def _check_device(name: str, value: Tensor, target: Tensor) -> None:
    if value.device != target.device:
        raise ValueError(f"{name}: expected device {target.device} (of target), got {value.device}")


def _valid_mask(target: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return target != IGNORE_INDEX
    if not isinstance(mask, Tensor) or mask.shape != target.shape:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask: expected the shape of target {tuple(target.shape)}, got {got}")
    _check_device("mask", mask, target)
    return (mask != 0) & (target != IGNORE_INDEX)


def _token_advantages(advantages: Tensor, target: Tensor, starts: Tensor) -> Tensor:
    sequences = starts.numel() - 1
    per_token, per_sequence = tuple(target.shape), (sequences,)
    shape = tuple(advantages.shape) if isinstance(advantages, Tensor) else None
    if shape not in (per_token, per_sequence):
        got = shape if shape is not None else type(advantages).__name__
        raise ValueError(
            f"advantages: expected shape {per_sequence} (per sequence) or {per_token} "
            f"(per token), got {got}"
        )
    if not advantages.is_floating_point():
        raise ValueError(f"advantages: expected a floating-point dtype, got {advantages.dtype}")
    _check_device("advantages", advantages, target)
    advantages = advantages.detach()
    if advantages.dtype != torch.float64:
        advantages = advantages.float()
    if shape == per_token:
        return advantages
    return torch.repeat_interleave(advantages, starts.diff(), output_size=target.numel())


def _token_values(name: str, value: Tensor | None, target: Tensor) -> Tensor | None:
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.shape != target.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: expected the shape of target {tuple(target.shape)}, got {got}")
    if not value.is_floating_point():
        raise ValueError(f"{name}: expected a floating-point dtype, got {value.dtype}")
    _check_device(name, value, target)
    value = value.detach()
    return value if value.dtype == torch.float64 else value.float()


def _value_flags(
    target: Tensor,
    mask: Tensor,
    advantages: Tensor,
    extras: Mapping[str, Tensor | None],
    num_items_in_batch: Tensor | float | None,
) -> Tensor:
    """(6,) int64: lowest and highest valid target, then 1 for each kind of bad value."""

    def bad(value: Tensor | None) -> Tensor:
        if value is None:
            return target.new_zeros(())
        value = value.reshape(target.shape)
        return (~value.isfinite() & mask).any().long()

    valid = torch.where(mask, target, 0)
    low, high = (valid.amin(), valid.amax()) if target.numel() else (valid.sum(), valid.sum())
    items = target.new_zeros(())
    if num_items_in_batch is not None:
        count = torch.as_tensor(num_items_in_batch, device=target.device, dtype=torch.float64)
        if count.dim():
            raise ValueError(f"num_items_in_batch: expected a scalar, got {tuple(count.shape)}")
        items = (~(count.isfinite() & (count >= 0))).long()
    flags = [low, high, bad(advantages), bad(extras["old_logprobs"]), bad(extras["ref_logprobs"])]
    return torch.stack([*flags, items])


def _raise_on_flags(
    low: int, bad_advantage: int, bad_old: int, bad_ref: int, bad_items: int, items: object
) -> None:
    if low < 0:
        raise ValueError(f"target: expected ids >= 0 (or -100 for no loss), got {low}")
    for name, bad in (
        ("advantages", bad_advantage),
        ("old_logprobs", bad_old),
        ("ref_logprobs", bad_ref),
    ):
        if bad:
            raise ValueError(f"{name}: expected finite values on valid tokens, got NaN or infinity")
    if bad_items:
        raise ValueError(f"num_items_in_batch: expected a finite number >= 0, got {items!r}")
