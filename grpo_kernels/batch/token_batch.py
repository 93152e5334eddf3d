"""TokenBatch: the tokens that carry a loss, packed, with everything known before the forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.batch import host
from grpo_kernels.batch.inputs import TOKEN_FIELDS, UNKNOWN, OptionalFields
from grpo_kernels.batch.packing import packed_fields
from grpo_kernels.batch.sampling_mask import MASK_FIELDS, SamplingMask
from grpo_kernels.batch.segments import Segments, SequenceGroup, joined_fields


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Valid completion tokens of B sequences, packed into T rows. Build it with the class methods.

    Masked tokens (prompt, padding, tool results) are not in it. Everything that changes from batch
    to batch is a tensor, on the CPU if the host knows it, so that a compiler guards on no value.
    """

    target: Tensor  # (T,) int64
    advantages: Tensor  # (T,) fp32 (fp64 if any per-token input is fp64)
    cu_seqlens: Tensor  # (B + 1,) int64, offsets of the sequences; a sequence may be empty
    # (2, B) int64 on the CPU: the tokens of each sequence, and its tokens with an advantage other
    # than 0 (-1: unknown)
    counts: Tensor
    layout: Tensor  # int64 on the CPU, the shape of the caller's tokens: (B, L) or (T0,)
    rows: Tensor | None = None  # (T,) int64 positions in the caller's flattened layout; None: all
    max_target: Tensor | None = None  # () on the CPU, the largest target; None: unknown there
    advantages_per_token: bool = False  # passed per token, so they may differ within a sequence
    old_logprobs: Tensor | None = None  # (T,) of the policy at the start of the rollout batch
    ref_logprobs: Tensor | None = None  # (T,) of the reference model
    rollout_logprobs: Tensor | None = None  # (T,) reported by the rollout engine; NaN: unknown
    rollout_weights: Tensor | None = None  # (T,) the caller's correction of the difference
    sampling_mask: SamplingMask | None = None  # the ids that sampling left for the T tokens
    prompt_tokens: Tensor | None = None  # (B,) fp64, over all completions of each one's prompt
    num_items_in_batch: Tensor | None = None  # (); on the CPU if passed as a number
    num_tokens_in_micro_batch: Tensor | None = None  # (), like the next three
    num_sequences_in_micro_batch: Tensor | None = None
    num_prompts: Tensor | None = None
    entropy_scale: Tensor | None = None
    gradient_accumulation_steps: int = 1
    sequence_group: SequenceGroup | None = None  # ranks that share the sequences; None: only this

    @classmethod
    def from_padded(
        cls,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        **optional: Unpack[OptionalFields],
    ) -> TokenBatch:
        """Build a batch from padded sequences.

        Args:
            target: (B, L) int64 token ids; -100 marks a token without loss.
            advantages: (B,) per sequence, or (B, L) per token; finite.
            mask: (B, L) bool or 0/1, 1 for tokens that count. None: tokens other than -100.
            optional: further keyword arguments, None by default:

                * ``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``: (B, L).
                * ``rollout_weights``: (B, L), your own factors >= 0 to correct the difference
                  between policy and rollout engine; None: from the loss's
                  ``rollout_correction_mode``, if there are ``rollout_logprobs``.
                * ``sampling_mask``: a :class:`SamplingMask` of the B * L rows. Ratios, KL and
                  metrics then use log-probabilities that are renormalized over the mask; the
                  entropy is over the whole vocabulary. Pass old and reference log-probabilities of
                  the same kind (``masked_logprobs`` of ``linear_logprobs``).
                * ``num_items_in_batch``: the divisor of the token-sum losses (dapo, cispo, vespo):
                  the valid tokens of the accumulation window on all processes, divided by the
                  number of processes; None: the valid tokens here times
                  ``gradient_accumulation_steps``.
                * ``num_tokens_in_micro_batch``: the divisor of means over the tokens of a
                  micro-batch (bnpo, the entropy bonus): its valid tokens on all processes, divided
                  by the number of processes; None: the valid tokens here.
                * ``num_sequences_in_micro_batch``: the divisor of means over its sequences (grpo,
                  dr_grpo, gspo), counted in the same way, empty sequences included; None: the
                  sequences here. If you compute a micro-batch in pieces, pass the numbers of the
                  whole micro-batch with each piece.
                * ``prompt_tokens``: (B,), a divisor of ``prompt_mean``: the valid tokens of all
                  completions of the sequence's prompt. They may be in other micro-batches, so
                  shuffling is fine.
                * ``num_prompts``: the prompts of the accumulation window on all processes, divided
                  by the number of processes; None: the prompts here, counted in fractions, times
                  ``gradient_accumulation_steps``.
                * ``entropy_scale``: a factor on the entropy bonus that may change during a run;
                  None: 1.
                * ``gradient_accumulation_steps``: micro-batches per optimizer step, 1 by default.
                * ``lengths``, ``active_lengths``: B host integers each: the valid tokens of each
                  sequence, and its valid tokens with an advantage other than 0. Without them, a
                  batch on a GPU waits once for the device to learn them. With them a whole step
                  never waits: values are checked asynchronously on the device (a failure there ends
                  the CUDA context), except how the tokens are distributed over the sequences.
                  Without ``active_lengths``, rows with zero advantage are computed like the others.
                * ``sequence_group``: a process group (or a one-dimensional device mesh) that shares
                  the tokens of each sequence (context or sequence parallelism). Every rank passes
                  its part, possibly empty, of the same B sequences. Lengths, ratios and gates of a
                  sequence then cover all its tokens. The counts above default to the group's counts
                  per rank, and the mean of the ranks' losses and gradients equals the result of one
                  process with whole sequences. Building a batch, its loss and the backward are
                  collectives of the group; metrics are computed along with the loss.

        Raises:
            ValueError: a shape, dtype, device or value is wrong; the message names the argument.
                In a ``sequence_group`` all ranks raise.
        """
        return cls(**_fields(optional, target=target, advantages=advantages, mask=mask))

    @classmethod
    def from_packed(
        cls,
        target: Tensor,
        advantages: Tensor,
        cu_seqlens: Tensor,
        mask: Tensor | None = None,
        **optional: Unpack[OptionalFields],
    ) -> TokenBatch:
        """Build a batch from packed sequences.

        Args:
            target: (T,) int64 token ids; -100 marks a token without loss.
            advantages: (B,) per sequence, or (T,) per token; finite. If B equals T, they are per
                token.
            cu_seqlens: (B + 1,) offsets of the sequences, from 0 to T.
            mask: (T,) bool or 0/1, 1 for tokens that count. None: tokens other than -100.
            optional: as in :meth:`from_padded`, with per-token tensors (T,).

        Raises:
            ValueError: as for :meth:`from_padded`.
        """
        fields = _fields(
            optional,
            target=target,
            advantages=advantages,
            mask=mask,
            cu_seqlens=cu_seqlens,
            packed=True,
        )
        return cls(**fields)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens that carry a loss, on this rank."""
        return self.target.numel()

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the sequences."""
        group = self.sequence_group
        return 1 if group is None else dist.get_world_size(group.group)

    @property
    def num_sequences(self) -> int:
        """B, the number of sequences, empty ones included."""
        return self.counts.shape[1]

    @property
    def lengths(self) -> tuple[int, ...]:
        """(B,) tokens of each sequence, as host integers."""
        return tuple(host.values(self.counts)[0])

    @property
    def active_lengths(self) -> tuple[int, ...] | None:
        """(B,) tokens of each sequence with nonzero advantage; None: unknown on the host."""
        active = tuple(host.values(self.counts)[1])
        return None if UNKNOWN in (*active, *host.values(self.whole_counts)[1]) else active

    @property
    def whole_counts(self) -> Tensor:
        """(2, B) the counts of whole sequences, over all ranks that share them."""
        return self.counts if self.sequence_group is None else self.sequence_group.counts

    @property
    def segments(self) -> Segments:
        """The sequences, to reduce over."""
        return Segments(self.cu_seqlens, self.num_tokens, self.sequence_group)

    def tensors(self) -> list[Tensor | None]:
        """Return all tensor fields, then the sampling mask's, in a fixed order."""
        own = [getattr(self, name) for name in TENSOR_FIELDS]
        return own + [getattr(self.sampling_mask, name, None) for name in MASK_FIELDS]

    @classmethod
    def of_tensors(
        cls, tensors: Sequence[Tensor | None], per_token: bool, steps: int
    ) -> TokenBatch:
        """Rebuild a batch from :meth:`tensors` and its two other fields."""
        values = dict(zip((*TENSOR_FIELDS, *MASK_FIELDS), tensors, strict=True))
        of_mask: dict[str, Any] = {name: values.pop(name) for name in MASK_FIELDS}
        return cls(
            **values,  # type: ignore[arg-type]
            sampling_mask=None if of_mask["indices"] is None else SamplingMask(**of_mask),
            advantages_per_token=per_token,
            gradient_accumulation_steps=steps,
        )

    def of_tokens(self, name: str, values: Tensor) -> Tensor:
        """Return (T,) values of the batch's tokens, from (T,) values or the caller's layout."""
        got = values.device if isinstance(values, Tensor) else type(values).__name__
        if got != self.target.device:
            raise ValueError(f"{name}: expected a tensor on {self.target.device}, got {got}")
        if values.shape == self.target.shape:
            return values
        layout = tuple(host.values(self.layout))
        if values.shape != layout:
            raise ValueError(
                f"{name}: expected shape {tuple(self.target.shape)} (the batch's tokens) or "
                f"{layout} (its layout), got {tuple(values.shape)}"
            )
        return values.flatten() if self.rows is None else values.flatten()[self.rows]

    def narrow(self, start: int, stop: int) -> TokenBatch:
        """Return tokens start..stop; cut sequences keep the part inside."""
        lengths = self.segments.narrow(start, stop).lengths
        keep = torch.arange(start, stop, device=lengths.device)
        return self.select(keep, host.sync_to_host(lengths))

    def select(self, keep: Tensor, lengths: Tensor) -> TokenBatch:
        """Return the tokens ``keep`` (ascending int64), with (B,) sequence ``lengths`` on the CPU.

        A ``sequence_group`` is unchanged; the caller replaces it.
        """
        kept = torch.zeros_like(self.target).index_fill_(0, keep, 1)
        mask = self.sampling_mask
        per_token = dict[str, Any]()
        for name in ("target", "advantages", *TOKEN_FIELDS):
            value = getattr(self, name)
            per_token[name] = None if value is None else value[keep]
        return replace(
            self,
            rows=keep if self.rows is None else self.rows[keep],
            cu_seqlens=pad(kept.cumsum(0), (1, 0))[self.cu_seqlens],
            counts=torch.stack([lengths, torch.full_like(lengths, UNKNOWN)]),
            sampling_mask=None if mask is None else mask.take(keep),
            **per_token,
        )

    def occupied(self) -> TokenBatch:
        """Return the same tokens without the sequences that are empty on all ranks."""
        kept = self.whole_counts[0] > 0
        group = self.sequence_group
        counts = self.counts[:, kept]
        order = torch.argsort(self.segments.lengths == 0, stable=True)[: counts.shape[1]]
        cu_seqlens = pad(self.cu_seqlens.diff()[order].cumsum(0), (1, 0))
        group = None if group is None else group.take(order, kept)
        prompts = None if self.prompt_tokens is None else self.prompt_tokens[order]
        own: dict[str, Any] = {"sequence_group": group, "prompt_tokens": prompts}
        return replace(self, cu_seqlens=cu_seqlens, counts=counts, **own)


def _fields(optional: OptionalFields, **tokens: Any) -> dict[str, Any]:
    """Return the fields of a batch; in a sequence group all ranks succeed, or all raise."""
    others = {name: value for name, value in optional.items() if name != "sequence_group"}
    group = optional.get("sequence_group")
    make = partial(packed_fields, others, **tokens)
    return make() if group is None else joined_fields(group, make)


TENSOR_FIELDS = tuple(item.name for item in fields(TokenBatch) if str(item.type)[:6] == "Tensor")
