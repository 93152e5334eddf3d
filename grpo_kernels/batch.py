"""TokenBatch: the tokens that carry a loss, packed, with everything known before the forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_kernels.kept import KeptSet
from grpo_kernels.packing import LOGPROB_FIELDS, check_cu_seqlens, check_target, packed_fields


class OptionalFields(TypedDict, total=False):
    """What a batch may have besides targets, advantages and a mask."""

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    kept: KeptSet | None
    num_items_in_batch: Tensor | float | None
    num_tokens_in_micro_batch: Tensor | float | None
    entropy_scale: Tensor | float | None
    gradient_accumulation_steps: int


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
    kept: KeptSet | None = None  # of the T tokens, what sampling left to choose from
    num_items_in_batch: Tensor | float | None = None
    num_tokens_in_micro_batch: Tensor | float | None = None
    entropy_scale: Tensor | float | None = None
    gradient_accumulation_steps: int = 1

    @classmethod
    def from_padded(
        cls,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        **optional: Unpack[OptionalFields],
    ) -> TokenBatch:
        """From padded sequences.

        Args:
            target: (B, L) int64 token ids; -100 marks a token without loss.
            advantages: (B,) one per sequence, or (B, L) one per token; finite.
            mask: (B, L) bool or 0/1, 1 where the token counts. Default: where target is not -100.
            optional: ``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``: (B, L) or None.
                ``kept``: a :class:`KeptSet` of the B * L rows, or None. With it the policy is the
                distribution that top-p, top-k or min-p sampling drew from: its log-probabilities
                are renormalised over the kept ids, in ratios, KL and metrics; the entropy is that
                of the whole vocabulary. Old and reference log-probabilities must be of the same
                kind (``kept_logprobs`` of ``linear_logprobs``).
                ``num_items_in_batch``: what the token-sum losses (dapo, cispo, vespo) divide by,
                the valid tokens of the accumulation window per data-parallel process; None: the
                valid tokens here times ``gradient_accumulation_steps``.
                ``num_tokens_in_micro_batch``: what the means over a micro-batch (bnpo, the entropy
                bonus) divide by, its valid tokens per data-parallel process; None: those here.
                ``entropy_scale``: a factor on the entropy bonus that changes during a run; None: 1.
                ``gradient_accumulation_steps``: micro-batches per optimizer step, 1 by default.

        Raises:
            ValueError: a shape, dtype, device or value is wrong; the message names the argument.
        """
        check_target(target, 2, "(B, L)")
        sequences, length = target.shape
        starts = torch.arange(sequences + 1, device=target.device) * length
        return cls(**packed_fields(target, advantages, mask, starts, optional))

    @classmethod
    def from_packed(
        cls,
        target: Tensor,
        advantages: Tensor,
        cu_seqlens: Tensor,
        mask: Tensor | None = None,
        **optional: Unpack[OptionalFields],
    ) -> TokenBatch:
        """From packed sequences: ``target`` (T,), ``cu_seqlens`` (B + 1,) from 0 to T.

        ``advantages`` is (B,) or (T,), the log-probabilities and ``mask`` are (T,); the rest is as
        in :meth:`from_padded`. (If B equals T, ``advantages`` is read per token.)
        """
        check_target(target, 1, "(T,)")
        check_cu_seqlens(cu_seqlens, target)
        return cls(**packed_fields(target, advantages, mask, cu_seqlens.long(), optional))

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

    def _take(
        self, index: slice | Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]
    ) -> TokenBatch:
        fields = {name: getattr(self, name) for name in LOGPROB_FIELDS}
        return replace(
            self,
            target=self.target[index],
            advantages=self.advantages[index],
            rows=self.rows[index] if self.rows is not None else None,
            kept=self.kept.take(index) if self.kept is not None else None,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            **{name: value[index] for name, value in fields.items() if value is not None},
        )
