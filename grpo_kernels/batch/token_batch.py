"""TokenBatch: the tokens that carry a loss, packed, with everything known before the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypedDict

import torch
from torch import Tensor
from typing_extensions import Unpack

from grpo_kernels.batch.opaque import Opaque
from grpo_kernels.batch.packing import (
    LOGPROB_FIELDS,
    check_cu_seqlens,
    check_target,
    offsets_of,
    packed_fields,
)
from grpo_kernels.batch.sampling_mask import SamplingMask


class OptionalFields(TypedDict, total=False):
    """What a batch may have besides targets, advantages and a mask."""

    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    sampling_mask: SamplingMask | None
    num_items_in_batch: Tensor | float | None
    num_tokens_in_micro_batch: Tensor | float | None
    entropy_scale: Tensor | float | None
    gradient_accumulation_steps: int
    lengths: Sequence[int] | None
    active_lengths: Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class TokenBatch(Opaque):
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
    # (B,) how many of them have an advantage other than 0, as host integers; None: not known
    active_lengths: tuple[int, ...] | None = None
    advantages_per_token: bool = False  # given one per token, so they may differ in a sequence
    max_target: int | None = None  # the largest target; None: not known on the host
    old_logprobs: Tensor | None = None  # (T,) when the rollout batch was started
    ref_logprobs: Tensor | None = None  # (T,) of the reference model
    rollout_logprobs: Tensor | None = None  # (T,) reported by the rollout engine; NaN: unknown
    sampling_mask: SamplingMask | None = None  # of the T tokens, what sampling left to choose from
    num_items_in_batch: Tensor | float | None = None
    num_tokens_in_micro_batch: Tensor | float | None = None
    entropy_scale: Tensor | float | None = None
    gradient_accumulation_steps: int = 1

    def __post_init__(self) -> None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        plain = {k: v for k, v in values.items() if not isinstance(v, Tensor | SamplingMask)}
        if self.sampling_mask is not None:
            plain["mask_max_id"] = self.sampling_mask.max_id
        self._pack(plain)

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
                ``sampling_mask``: a :class:`SamplingMask` of the B * L rows, or None. With it the
                policy is the distribution that top-p, top-k or min-p sampling drew from: its
                log-probabilities are renormalised over the mask, in ratios, KL and metrics; the
                entropy is that
                of the whole vocabulary. Old and reference log-probabilities must be of the same
                kind (``masked_logprobs`` of ``linear_logprobs``).
                ``num_items_in_batch``: what the token-sum losses (dapo, cispo, vespo) divide by,
                the valid tokens of the accumulation window per data-parallel process; None: the
                valid tokens here times ``gradient_accumulation_steps``.
                ``num_tokens_in_micro_batch``: what the means over a micro-batch (bnpo, the entropy
                bonus) divide by, its valid tokens per data-parallel process; None: those here.
                ``entropy_scale``: a factor on the entropy bonus that changes during a run; None: 1.
                ``gradient_accumulation_steps``: micro-batches per optimizer step, 1 by default.
                ``lengths``: B host integers, the valid tokens of each sequence, and
                ``active_lengths``: those of them whose advantage is not 0. On a GPU a batch waits
                once for the device to learn these; given, a whole step waits for nothing. Values
                are then checked on the device, later (a failure there ends the CUDA context), and
                how the tokens are shared out among the sequences is taken on trust. Without
                ``active_lengths`` rows of zero advantage are computed like others. On a CPU all
                is checked.

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
    def tensors(self) -> list[Tensor]:
        """Every tensor of the batch."""
        values = [getattr(owner, field.name) for owner in (self, self.sampling_mask)
                  if owner is not None for field in fields(owner)]  # fmt: skip
        return [value for value in values if isinstance(value, Tensor)]

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

    def select(self, keep: Tensor, lengths: tuple[int, ...] | None = None) -> TokenBatch:
        """The tokens of the int64 index ``keep`` (ascending), in the same B sequences.

        ``lengths`` says how many are of each sequence; None: by a host transfer.
        """
        sampling_mask = torch.zeros_like(self.target).index_fill_(0, keep, 1)
        counts = self.segment_sum(sampling_mask.double()).long()
        if lengths is None:
            lengths = tuple(counts.tolist())
        return self._take(keep, offsets_of(counts), lengths)

    def occupied(self) -> TokenBatch:
        """The same tokens without the sequences that have none."""
        lengths = tuple(length for length in self.lengths if length)
        counts = self.cu_seqlens.diff()
        order = torch.argsort(counts == 0, stable=True)[: len(lengths)]
        return replace(
            self, cu_seqlens=offsets_of(counts[order]), lengths=lengths, active_lengths=None
        )

    def overwrite(self, other: TokenBatch) -> None:
        """Copies the tensors of ``other`` into this batch's, for the replay of a captured graph.

        Values may differ, what the host knows may not: lengths, layout, which tensors there are,
        numbers that are no tensors.

        Raises:
            ValueError: they differ, or there is a sampling mask, whose size is data.
        """
        if self.sampling_mask is not None or other.sampling_mask is not None:
            raise ValueError(
                "sampling_mask: expected None to overwrite a batch, got a SamplingMask"
            )
        for field in fields(self):
            mine, new = getattr(self, field.name), getattr(other, field.name)
            both = isinstance(mine, Tensor) and isinstance(new, Tensor)
            same = mine.shape == new.shape if both else type(mine) is type(new) and mine == new
            if not same and field.name != "max_target":
                raise ValueError(f"{field.name}: expected {_known(mine)}, got {_known(new)}")
        for field in fields(self):
            mine = getattr(self, field.name)
            if isinstance(mine, Tensor):
                mine.copy_(getattr(other, field.name))
        object.__setattr__(self, "max_target", None)  # from now on looked up on the device
        self.__post_init__()

    def _take(
        self, index: slice | Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]
    ) -> TokenBatch:
        fields = {name: getattr(self, name) for name in LOGPROB_FIELDS}
        return replace(
            self,
            target=self.target[index],
            advantages=self.advantages[index],
            rows=self.rows[index] if self.rows is not None else None,
            sampling_mask=self.sampling_mask.take(index)
            if self.sampling_mask is not None
            else None,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
            active_lengths=None,
            **{name: value[index] for name, value in fields.items() if value is not None},
        )


def _known(value: object) -> str:
    """What the host knows of a field."""
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
