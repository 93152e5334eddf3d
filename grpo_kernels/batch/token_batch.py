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
    """Valid completion tokens of B sequences, packed to T rows. Build it with the class methods.

    Masked tokens (prompt, padding, tool results) are not in it. What changes from batch to batch is
    in tensors, what the host knows in CPU tensors, so that a compiler guards on none of it.
    """

    target: Tensor  # (T,) int64
    advantages: Tensor  # (T,) fp32 (fp64 if any vector is given so)
    cu_seqlens: Tensor  # (B + 1,) int64, offsets of the sequences; a sequence may be empty
    # (2, B) int64 on the CPU: tokens of each sequence, and those of them whose advantage is not 0
    # (-1: not known)
    counts: Tensor
    layout: Tensor  # int64 on the CPU, the shape of the caller's tokens: (B, L) or (T0,)
    rows: Tensor | None = None  # (T,) int64 positions in the caller's flattened layout; None: all
    max_target: Tensor | None = None  # () on the CPU, the largest target; None: not known there
    advantages_per_token: bool = False  # given one per token, so they may differ in a sequence
    old_logprobs: Tensor | None = None  # (T,) when the rollout batch was started
    ref_logprobs: Tensor | None = None  # (T,) of the reference model
    rollout_logprobs: Tensor | None = None  # (T,) reported by the rollout engine; NaN: unknown
    rollout_weights: Tensor | None = None  # (T,) correction that the caller has made of them
    sampling_mask: SamplingMask | None = None  # of the T tokens, what sampling left to choose from
    prompt_tokens: Tensor | None = None  # (B,) fp64, of all sequences of each one's prompt
    num_items_in_batch: Tensor | None = None  # (); on the CPU if given as a number
    num_tokens_in_micro_batch: Tensor | None = None  # likewise, as the next three
    num_sequences_in_micro_batch: Tensor | None = None
    num_prompts: Tensor | None = None
    entropy_scale: Tensor | None = None
    gradient_accumulation_steps: int = 1
    sequence_group: SequenceGroup | None = None  # the ranks that hold a sequence; None: this one

    @classmethod
    def from_padded(
        cls,
        target: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        **optional: Unpack[OptionalFields],
    ) -> TokenBatch:
        """Make a batch from padded sequences.

        Args:
            target: (B, L) int64 token ids; -100 marks a token without loss.
            advantages: (B,) one per sequence, or (B, L) one per token; finite.
            mask: (B, L) bool or 0/1, 1 where the token counts. Default: where target is not -100.
            optional: what else there is, each None if it is not given:

                * ``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``: (B, L).
                * ``rollout_weights``: (B, L), factors >= 0 against the difference between the
                  policy and the rollout engine, for callers who compute them; None: those of the
                  loss's ``rollout_correction_mode``, if there are ``rollout_logprobs``.
                * ``sampling_mask``: a :class:`SamplingMask` of the B * L rows. With it
                  log-probabilities are renormalised over the mask, in ratios, KL and metrics; the
                  entropy is that of the whole vocabulary. Old and reference log-probabilities must
                  be of the same kind (``masked_logprobs`` of ``linear_logprobs``).
                * ``num_items_in_batch``: what the token-sum losses (dapo, cispo, vespo) divide by,
                  the valid tokens of the accumulation window on all processes, divided by the
                  number of processes; None: the valid tokens here times
                  ``gradient_accumulation_steps``.
                * ``num_tokens_in_micro_batch``: what the means over a micro-batch (bnpo, the
                  entropy bonus) divide by, its valid tokens likewise; None: those here.
                * ``num_sequences_in_micro_batch``: what the means over its sequences (grpo,
                  dr_grpo, gspo) divide by, empty ones too, likewise; None: those here. Where a
                  micro-batch is computed in pieces, each is given the numbers of the whole.
                * ``prompt_tokens``: (B,), which ``prompt_mean`` divides by: the valid tokens of all
                  completions of the sequence's prompt, wherever they are: shuffled micro-batches
                  are right.
                * ``num_prompts``: how many prompts the accumulation window has on all processes,
                  divided by the number of processes; None: those here, in parts, times
                  ``gradient_accumulation_steps``.
                * ``entropy_scale``: a factor on the entropy bonus that changes during a run;
                  None: 1.
                * ``gradient_accumulation_steps``: micro-batches per optimizer step, 1 by default.
                * ``lengths``: B host integers, the valid tokens of each sequence, and
                  ``active_lengths``: those of them whose advantage is not 0. On a GPU a batch waits
                  once for the device to learn these; given, a whole step waits for nothing, values
                  are checked on the device, later (a failure there ends the CUDA context), and how
                  the tokens are distributed over the sequences is not. Without ``active_lengths``
                  rows of zero advantage are computed like others.
                * ``sequence_group``: a process group (or a device mesh of one dimension), over
                  whose ranks the tokens of each sequence are spread (context or sequence
                  parallelism): every rank gives its part of the same B sequences, which may be
                  empty. Whatever is of a sequence (its length, its ratio, its gates) is then of all
                  its tokens. The numbers of tokens above are, where they are None, those of the
                  group per rank; the mean of the ranks' losses and gradients is that of one process
                  with whole sequences. Building a batch, its loss and the backward are collectives
                  of the group; the metrics are computed along with the loss.

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
        """Make a batch from packed ones: ``target`` (T,), ``cu_seqlens`` (B + 1,) from 0 to T.

        ``advantages`` is (B,) or (T,), the log-probabilities and ``mask`` are (T,); the rest is as
        in :meth:`from_padded`. (If B equals T, ``advantages`` is read per token.)
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
        """The ranks that hold parts of the sequences."""
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
        """(B,) those of them whose advantage is not 0; None: the host does not know."""
        active = tuple(host.values(self.counts)[1])
        return None if UNKNOWN in (*active, *host.values(self.whole_counts)[1]) else active

    @property
    def whole_counts(self) -> Tensor:
        """(2, B) the counts of whole sequences, of which this rank may hold a part."""
        return self.counts if self.sequence_group is None else self.sequence_group.counts

    @property
    def segments(self) -> Segments:
        """The sequences, to reduce over."""
        return Segments(self.cu_seqlens, self.num_tokens, self.sequence_group)

    def tensors(self) -> list[Tensor | None]:
        """Return every tensor field and those of the sampling mask, in a fixed order."""
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
        """Return those of the (T,) tokens, of values for them or in the caller's layout."""
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
        """Return tokens start..stop; cut sequences keep what lies inside."""
        lengths = self.segments.narrow(start, stop).lengths
        keep = torch.arange(start, stop, device=lengths.device)
        return self.select(keep, host.sync_to_host(lengths))

    def select(self, keep: Tensor, lengths: Tensor) -> TokenBatch:
        """Return tokens ``keep`` (ascending int64), ``lengths`` (B,) on the CPU of each sequence.

        A ``sequence_group`` stays as it is, for the caller to replace.
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
        """Return the same tokens without the sequences that have none, on any rank."""
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
    """Return the fields of a batch, on every rank of its sequence group or on none."""
    others = {name: value for name, value in optional.items() if name != "sequence_group"}
    group = optional.get("sequence_group")
    make = partial(packed_fields, others, **tokens)
    return make() if group is None else joined_fields(group, make)


TENSOR_FIELDS = tuple(item.name for item in fields(TokenBatch) if str(item.type)[:6] == "Tensor")
