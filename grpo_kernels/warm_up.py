"""warm_up: compile what a training step will launch, before the first step."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.batch import SamplingMask, TokenBatch
from grpo_kernels.engine import Rows, RunOptions
from grpo_kernels.head import Head, HeadLoRA, check_weight, head_of, unshard_head
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import Plan, planned, run_plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

INPUTS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_weights", "sampling_mask")

_LENGTH = 4  # tokens of a sequence
_TILE_ROWS = 16
_ONE_CHUNK, _CHUNKS = 2, 6  # sequences: of one tile, and of more
_THIN = 16  # columns of D where kernels see the logits alone


def warm_up(
    weight: Tensor | Head,
    config: LossConfig,
    *,
    dtype: torch.dtype | None = None,
    inputs: Collection[str] = (),
    gradients: bool = True,
    group: ProcessGroup | None = None,
    bias: Tensor | None = None,
    lora: HeadLoRA | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    **options: Any,
) -> None:
    """Compile what ``linear_policy_loss`` will launch for this head and loss.

    It runs the loss on a few rows, forward and backward, in all ways that a batch of any size may
    take. No gradient is left anywhere, and the random state stays. Where nothing is compiled (every
    backend but Triton's) none is run. Call it under the autocast of the training step. It
    does not prepare calls inside ``torch.compile``.

    Args:
        weight, bias, lora, logit_scale, softcap: the head, as for ``linear_policy_loss``; what
            requires a gradient there must require it here.
        config: the loss.
        dtype: of the hidden states; None: that of the weight.
        inputs: what the batches will have of ``old_logprobs``, ``ref_logprobs``,
            ``rollout_logprobs``, ``rollout_weights`` and ``sampling_mask``.
        gradients: False for calls without a gradient alone.
        group: processes that all call this function. On each machine the process whose
            ``LOCAL_RANK`` is 0 compiles while the others wait at a barrier of the group; then
            these find the kernels in Triton's cache on disk. None: this process waits for none.
        options: ``precision``, ``backend``, ``schedule``, ``max_workspace_bytes``,
            ``batch_invariant``, ``metric_rows``, as for ``linear_policy_loss``.

    Raises:
        ValueError: as ``linear_policy_loss`` would for such a call; an input has an unknown name;
            there is a group but no ``LOCAL_RANK``.
    """
    if not isinstance(config, LossConfig):
        raise ValueError(f"config: expected a LossConfig, got {type(config).__name__}")
    head = head_of(weight, bias, lora, logit_scale, softcap, config.temperature)
    head = unshard_head(head)  # by all processes at once
    check_weight(head.weight)
    with _first_of_each_machine_first(group):
        unknown = sorted(set(inputs) - set(INPUTS))
        if unknown:
            raise ValueError(f"inputs: expected some of {', '.join(INPUTS)}; got {unknown[0]!r}")
        dtype = head.weight.dtype if dtype is None else dtype
        _Steps(head, config, RunOptions(**options), dtype, tuple(inputs), gradients).run()


@contextmanager
def _first_of_each_machine_first(group: ProcessGroup | None) -> Iterator[None]:
    """Let the block run in the first process of a machine, then in its others."""
    if group is None:
        yield
        return
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        raise ValueError("group: expected LOCAL_RANK in the environment, as torchrun sets it")
    first = int(rank) == 0
    if not first:
        torch.distributed.barrier(group)
    try:
        yield
    finally:  # nobody waits for a process that failed, be it before it compiled anything
        if first:
            torch.distributed.barrier(group)


@dataclass(frozen=True)
class _Steps:
    """Steps on a few rows that launch together what any step launches."""

    head: Head
    config: LossConfig
    options: RunOptions
    dtype: torch.dtype
    inputs: tuple[str, ...]
    gradients: bool

    def run(self) -> None:
        with torch.set_grad_enabled(self.gradients):
            plan = self._planned(self.head, _ONE_CHUNK, self.options)[1]
        if not plan.route.backend.compiles:
            return
        options = replace(self.options, max_workspace_bytes=_TILE_ROWS * plan.route.row_bytes)
        with torch.no_grad():  # also of rows without an advantage
            run_plan(*self._planned(_part(self.head, trained=False), _ONE_CHUNK, options))
        steps = self._with_gradients(plan, options) if self.gradients else ()
        with torch.enable_grad():
            for head, sequences, asked in steps:
                rows, plan = self._planned(head, sequences, asked)
                trained = [x for x in rows.inputs if x is not None and x.requires_grad]
                torch.autograd.grad(run_plan(rows, plan).loss, trained)

    def _with_gradients(
        self, plan: Plan, options: RunOptions
    ) -> Iterator[tuple[Head, int, RunOptions]]:
        """Yield head, sequences and options of steps with gradients."""
        # The weight stays frozen where it is whole: no (V, D) tensor is made. Two passes do the
        # same to a weight that is trained.
        frozen, thin = _part(self.head, trained=False), _part(self.head, trained=True, depth=_THIN)
        if options.schedule != "one_pass":
            two = replace(options, schedule="two_pass")
            formed_again = replace(two, activation_bytes=0)
            yield frozen, _CHUNKS, formed_again if plan.needs.of_head else two
            if plan.needs.of_head and options.activation_bytes:  # or kept
                yield thin, _CHUNKS, two
        if options.schedule != "two_pass" and plan.why_two_passes is None:
            # what fixes a row's bits is no other kernel
            one = replace(options, schedule="one_pass", batch_invariant=False)
            yield thin, _ONE_CHUNK, one  # one gradient
            yield thin, _CHUNKS, one  # a sum of several

    def _planned(self, head: Head, sequences: int, options: RunOptions) -> tuple[Rows, Plan]:
        shape = (sequences, _LENGTH, head.weight.shape[1])
        device, needs = head.weight.device, torch.is_grad_enabled()
        hidden = torch.zeros(shape, dtype=self.dtype, device=device, requires_grad=needs)
        return planned(hidden, head, self._batch(sequences), self.config, options)

    def _batch(self, sequences: int) -> TokenBatch:
        """Return a batch in which every token has an advantage."""
        device = self.head.weight.device
        zeros = torch.zeros(sequences, _LENGTH, device=device)
        target, lengths = zeros.long(), [_LENGTH] * sequences
        given: dict[str, Any] = {name: zeros for name in self.inputs if name != "sampling_mask"}
        if "sampling_mask" in self.inputs:
            given["sampling_mask"] = SamplingMask.from_padded(target[..., None])
        advantages = torch.ones(sequences, device=device)
        return TokenBatch.from_padded(
            target, advantages, lengths=lengths, active_lengths=lengths, **given
        )


def _part(head: Head, trained: bool, depth: int | None = None) -> Head:
    """Return the same head on the first ``depth`` columns, apart from autograd's graph."""

    weight, bias, a, b = (None if x is None else x.detach() for x in head.tensors)
    assert weight is not None
    part = head.with_tensors(weight[:, :depth], bias, None if a is None else a[:, :depth], b)
    for own, of in zip(part.tensors, head.tensors, strict=True):
        if own is not None and of is not None:
            own.requires_grad_(trained and of.requires_grad)
    return part
