"""Completions, their rewards and advantages, and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels import Metrics, SamplingMask, TokenBatch
from grpo_kernels.batch import IGNORE_INDEX
from grpo_kernels.losses import Stat
from grpo_trainer.data.images import ImageInputs, model_inputs
from grpo_trainer.data.prompts import Prompt
from grpo_trainer.data.rows import DatasetRow, Row, check_plain


@dataclass
class Sample:
    """One completion. It starts as a prompt; an engine, tools or the user's function complete it,
    and scoring adds the rest."""

    prompt: Prompt
    prompt_ids: list[int] = field(default_factory=list)
    completion: Any = None  # text, or messages for a conversational prompt
    completion_ids: list[int] = field(default_factory=list)
    truncated: bool = False  # ended without an end-of-sequence token
    logprobs: list[float] | None = None  # of the tokens, from the engine that sampled them
    sampling_mask: list[list[int]] | None = None  # ids that its filters kept, per token
    # per token: the optimizer steps before the weights that sampled it
    rollout_versions: list[int] | None = None
    # (tokens, layers, K) integers: the experts that the engine used for prompt and completion,
    # except the last token, which it did not run; -1: unknown
    routed_experts: Tensor | None = None
    env_mask: list[int] | None = None  # 1: the policy's token, 0: a tool's; None: all the policy's
    images: ImageInputs | None = None  # of the prompt and of tools' answers
    row: Row | None = None  # the dataset's row
    # a copy of the row that functions may edit, plus the environment; empty after scoring
    inputs: Row = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)  # from a rollout_func, for rewards
    extra: dict[str, Any] = field(default_factory=dict)  # columns logged by reward functions
    left_out: bool = False  # excluded from the loss
    oldest_version: int = 0  # tokens from older weights are excluded from the loss

    def state(self) -> dict[str, Any]:
        """Return the parts that a checkpoint can hold.

        Raises:
            ValueError: it has images, or its row has values that are not plain data.
        """
        if self.images is not None:
            raise ValueError("Sample.state: expected a prompt without a processor, got images")
        row = self.row
        for name, value in (self.columns | (row or {})).items():
            check_plain(f"Sample.state: column {name!r}", value)
        state = {
            "prompt": self.prompt,
            "row": row and dict(row),
            "original": getattr(row, "original", None),
        }
        return state | self.completed_state()

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Sample:
        """Return the sample that :meth:`state` describes."""
        row = state["row"] and DatasetRow(state["row"], original=state["original"])
        sample = cls(state["prompt"], row=row)
        sample.restore_completed(state)
        return sample

    def completed_state(self) -> dict[str, Any]:
        """Return everything that completing it has added."""
        return {name: getattr(self, name) for name in _COMPLETED}

    def restore_completed(self, state: dict[str, Any]) -> None:
        """Complete it from a :meth:`completed_state`."""
        for name in _COMPLETED:
            setattr(self, name, state[name])

    def completed(self, completion: Any, ids: list[int], eos_token_ids: Collection[int]) -> None:
        """Add the completion and its tokens."""
        self.completion, self.completion_ids = completion, ids
        self.truncated = ids[-1] not in eos_token_ids

    @property
    def by_policy(self) -> list[int]:
        """1 for each token that the policy sampled, 0 for tokens of tools and environments."""
        return [1] * len(self.completion_ids) if self.env_mask is None else self.env_mask

    @property
    def in_loss(self) -> list[int]:
        """1 for each token in the loss, else 0."""
        if self.left_out:
            return [0] * len(self.completion_ids)
        if self.rollout_versions is None or min(self.rollout_versions) >= self.oldest_version:
            return self.by_policy
        pairs = zip(self.by_policy, self.rollout_versions, strict=True)
        return [own * (version >= self.oldest_version) for own, version in pairs]


# fields that are set when a sample is completed, and stored in checkpoints
_COMPLETED = (
    *("prompt_ids", "completion", "completion_ids", "truncated", "logprobs", "sampling_mask"),
    *("routed_experts", "rollout_versions", "env_mask", "columns"),
)


class Advantages(NamedTuple):
    """The result of comparing N completions within their groups."""

    advantages: Tensor  # (N,) finite; (N, C) one per completion token, right-padded
    rewards: Tensor  # (N,) weighted sum of the rewards; NaN if none applies
    zero_std: Tensor  # (N,) bool: equal rewards, and no advantages from a function
    signal: Tensor  # (N / group_size,) bool: the group's completions get different advantages


class Scored(NamedTuple):
    """A generation batch: this process's n completions, and the rewards and advantages of all N
    completions on all processes. Groups are consecutive."""

    samples: list[Sample]  # n
    rewards: Tensor  # (N, F) NaN: the reward does not apply
    compared: Advantages  # of all N completions
    num_tokens: Tensor  # () tokens of prompts and completions, on all processes
    own: slice  # this process's part of N

    def groups(self) -> list[tuple[list[Sample], bool]]:
        """Return this process's groups, each with whether its advantages differ.

        Raises:
            ValueError: a group is split between processes.
        """
        size = len(self.rewards) // len(self.compared.signal)
        if self.own.start % size or len(self.samples) % size:
            raise ValueError(
                f"per_device_train_batch_size: expected whole groups of {size} completions on "
                f"each process, got {len(self.samples)} completions"
            )
        first, signal = self.own.start // size, self.compared.signal.tolist()
        parts = [self.samples[i : i + size] for i in range(0, len(self.samples), size)]
        return [(part, signal[first + index]) for index, part in enumerate(parts)]


class Divisors(NamedTuple):
    """The divisors of sums and means over a micro-batch. A window is the micro-steps of one
    optimizer step, and gradients are averaged over processes."""

    num_items: Tensor  # () for token sums: tokens in the loss, per micro-step of the window
    num_tokens: Tensor  # () for means over tokens of this micro-step
    num_sequences: Tensor | float | None = None  # for means over sequences; None: the batch's
    num_prompts: Tensor | None = None  # () for means over prompts, per micro-step of the window
    share: float = 1.0  # the micro-batch's share of its micro-step


@dataclass
class MicroBatch:
    """B prompts with their completions, right-padded to L tokens.

    ``target[b, t]`` is the token that position t predicts, ``input_ids[b, t + 1]``, if it is in the
    loss, else -100. So the hidden states need no slicing.
    """

    input_ids: Tensor  # (B, L) int64
    attention_mask: Tensor  # (B, L) int64
    target: Tensor  # (B, L) int64
    advantages: Tensor  # (B,) fp32, or (B, L): one per element of `target`
    num_items: Tensor  # () tokens in the loss, per micro-step of the optimizer step
    num_tokens: Tensor  # () tokens in the loss of this micro-step
    num_sequences: Tensor | float | None = None  # of this micro-step; None: count the batch's
    num_prompts: Tensor | None = None  # () per micro-step of the optimizer step
    share: float = 1.0  # the micro-batch's share of its micro-step
    old_logprobs: Tensor | None = None  # (B, L) from the policy before its update
    ref_logprobs: Tensor | None = None  # (B, L) from the reference model
    rollout_logprobs: Tensor | None = None  # (B, L) from the engine that sampled the tokens
    sampling_mask: SamplingMask | None = None  # B * L rows: the ids that its filters kept
    # (B, L, layers, K) int16: experts that the policy replays; -1: the policy's own choice
    routed_experts: Tensor | None = None
    inputs: dict[str, Tensor] = field(default_factory=dict)  # more model inputs: images
    prompt_tokens: Tensor | None = None  # (B,) int64 tokens in the loss of each row's prompt
    # (R, W) int64: which of the B * L elements the body runs on, and at which places
    packed: Tensor | None = None
    # (B, L) int16: the row whose packed token represents each element; None: its own
    owners: Tensor | None = None
    # B numbers: each row's tokens in the loss, so a step need not read them from a device; None:
    # unknown on the CPU
    lengths: list[int] | None = None
    active_lengths: list[int] | None = None  # the same with an advantage other than 0
    samples: Sequence[Sample] | None = None  # one per row, while columns run

    def at_targets(self, rows: Sequence[Sequence[float]]) -> Tensor:  # (B, L) fp32
        """Place each completion token's number where ``target`` has that token; 0 elsewhere.
        Columns can call it."""
        assert self.samples is not None  # columns are running
        placed = torch.zeros(self.target.shape)
        for place, sample, values in zip(placed, self.samples, rows, strict=True):
            if len(values) != len(sample.completion_ids):
                raise ValueError(
                    f"at_targets: expected {len(sample.completion_ids)} numbers, one per token of "
                    f"the completion, got {len(values)}"
                )
            start = len(sample.prompt_ids) - 1
            place[start : start + len(values)] = torch.as_tensor(values)
        return placed.to(self.target.device)

    def token_mean(self, name: str, values: Tensor, places: Tensor | None = None) -> Metrics:
        """Return Metrics with the mean of ``values``, (B, L), over the tokens in the loss, or over
        ``places``, (B, L) bool."""
        places = self.target != IGNORE_INDEX if places is None else places
        total = values.detach().where(places, 0.0).double().sum()
        return Metrics({name: Stat("mean", total, places.double().sum())})

    def add_to_advantages(self, values: Tensor) -> None:  # (B, L), at the places of `target`
        """Add ``values`` to the advantages of the tokens in the loss."""
        if self.advantages.dim() == 1:
            self.advantages = self.advantages[:, None].expand(self.target.shape)
        self.advantages = self.advantages + values.where(self.target != IGNORE_INDEX, 0.0)
        self.lengths = self.active_lengths = None  # the old counts are no longer valid

    def num_active(self) -> Tensor:  # (2,) fp64
        """Count the completions with a nonzero advantage in the loss, and their prompts. A prompt
        counts by the share of its tokens that these completions have."""
        in_loss = self.target != IGNORE_INDEX
        advantages = self.advantages.view(len(self.target), -1)
        active = (in_loss & (advantages != 0)).any(1).double()
        tokens = in_loss.sum(1)
        of_prompt = tokens if self.prompt_tokens is None else self.prompt_tokens
        return torch.stack([active.sum(), (active * tokens / of_prompt.clamp(min=1)).sum()])

    def token_batch(
        self, gradient_accumulation_steps: int, entropy_scale: Tensor | None = None
    ) -> TokenBatch:
        """Return the tokens in the loss. ``num_items`` scales with the window's micro-batches."""
        steps, prompts = gradient_accumulation_steps, self.num_prompts
        return TokenBatch.from_padded(
            self.target,
            self.advantages,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            rollout_logprobs=self.rollout_logprobs,
            sampling_mask=self.sampling_mask,
            num_items_in_batch=self.num_items * steps,
            num_tokens_in_micro_batch=self.num_tokens,
            num_sequences_in_micro_batch=self.num_sequences,
            prompt_tokens=self.prompt_tokens,
            num_prompts=None if prompts is None else prompts * steps,
            entropy_scale=entropy_scale,
            gradient_accumulation_steps=steps,
            lengths=self.lengths,
            active_lengths=self.active_lengths,
        )


def padded_length(lengths: Sequence[int], pad_to_multiple_of: int | None = None) -> int:
    """Return the width in tokens of the micro-batch of these rows."""
    return max(lengths) + -max(lengths) % (pad_to_multiple_of or 1)


def collate(
    samples: Sequence[Sample],
    advantages: Tensor,  # (B,); (B, C) one per completion token
    divisors: Divisors,
    pad_token_id: int,
    pad_to_multiple_of: int | None = None,
    prompt_tokens: Tensor | None = None,  # (B,)
) -> MicroBatch:
    """Join and pad B completions, on the device of ``advantages``; reads its values."""
    device, known = advantages.device, advantages.cpu()
    rows = [sample.prompt_ids + sample.completion_ids for sample in samples]
    lengths = [len(row) for row in rows]
    starts = torch.tensor([len(sample.prompt_ids) for sample in samples])
    place = torch.arange(padded_length(lengths, pad_to_multiple_of))
    filled = place < torch.tensor(lengths)[:, None]
    completion = filled & (place >= starts[:, None])
    input_ids = torch.full(filled.shape, pad_token_id)
    input_ids[filled] = torch.tensor([*chain(*rows)])
    in_loss = _at_targets([sample.in_loss for sample in samples], completion) != 0
    rollout_logprobs = None
    logprobs = [sample.logprobs for sample in samples if sample.logprobs is not None]
    if len(logprobs) == len(samples):
        rollout_logprobs = _at_targets(logprobs, completion).to(device)
    if advantages.dim() == 2:
        pairs = zip(known.tolist(), samples, strict=True)
        of_tokens = [values[: len(sample.completion_ids)] for values, sample in pairs]
        known = _at_targets(of_tokens, completion)
        advantages = known.to(device)
    active = in_loss & (known.view(len(samples), -1) != 0)
    images = [sample.images for sample in samples]
    return MicroBatch(
        input_ids.to(device),
        filled.long().to(device),
        input_ids.roll(-1, dims=1).where(in_loss, IGNORE_INDEX).to(device),
        advantages,
        **divisors._asdict(),
        prompt_tokens=prompt_tokens,
        rollout_logprobs=rollout_logprobs,
        sampling_mask=_sampling_mask(samples, input_ids.shape[1], device),
        inputs=model_inputs(images, lengths, input_ids.shape[1], device),
        lengths=in_loss.sum(1).tolist(),
        active_lengths=active.sum(1).tolist(),
        samples=samples,
    )


def _at_targets(rows: Sequence[Sequence[float]], completion: Tensor) -> Tensor:  # (B, L)
    """Place the value of each token of ``completion``, (B, L) bool, where ``target`` has the token;
    0 elsewhere."""
    placed = torch.zeros(completion.shape)
    placed[:, :-1][completion[:, 1:]] = torch.tensor([*chain(*rows)], dtype=torch.float32)
    return placed


def _sampling_mask(
    samples: Sequence[Sample], width: int, device: torch.device
) -> SamplingMask | None:
    """Return a row for each element of ``target``: a sampled token's ids, else none."""
    rows: list[list[int]] = []
    for number, sample in enumerate(samples, 1):
        if sample.sampling_mask is None:
            return None
        rows += [[]] * (len(sample.prompt_ids) - 1) + sample.sampling_mask
        rows += [[]] * (number * width - len(rows))
    return SamplingMask.from_lists(rows, device)


class RolloutBuffer:
    """Returns a generation batch's micro-batches in turn, and requests the next batch when used up.

    Args:
        slices: micro-steps per pass over a generation batch; they share its micro-batches.
        iterations: passes over each generation batch.
    """

    def __init__(self, slices: int, iterations: int) -> None:
        self._slices = slices
        self._uses = slices * iterations
        self.position = 0  # micro-steps taken
        self.batches: list[MicroBatch] = []

    def current(self, make: Callable[[], list[MicroBatch]]) -> list[MicroBatch]:
        """Return the micro-batches of this micro-step."""
        if not self.batches or self.position % self._uses == 0:
            self.batches = []  # free the memory before vLLM wakes
            self.batches = make()
        step, count = self.position % self._slices, len(self.batches)
        return self.batches[step * count // self._slices : (step + 1) * count // self._slices]

    def state(self) -> dict[str, Any]:
        return {"position": self.position, "batches": [_plain(batch) for batch in self.batches]}

    def restore(self, state: dict[str, Any]) -> None:
        self.position = state["position"]
        self.batches = [_batch(**fields) for fields in state["batches"]]


def _plain(batch: MicroBatch) -> dict[str, Any]:
    """Return the fields of a batch in a form that checkpoints can hold."""
    mask = batch.sampling_mask
    csr = None if mask is None else {"indices": mask.indices, "offsets": mask.offsets}
    return vars(batch) | {"sampling_mask": csr}


def _batch(sampling_mask: dict[str, Tensor] | None, **attributes: Any) -> MicroBatch:
    known = MicroBatch.__dataclass_fields__
    if attributes.pop("shares_prompts", False):  # version 1.0.0 packed these in another way
        attributes["packed"] = None
    batch = MicroBatch(**{name: attributes[name] for name in attributes if name in known})
    vars(batch).update(attributes)  # including attributes set by columns
    if sampling_mask is not None:
        batch.sampling_mask = SamplingMask.from_csr(**sampling_mask)
    return batch
