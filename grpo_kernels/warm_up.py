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
from grpo_kernels.engine import RunOptions
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
        steps = _Steps(head, config, RunOptions(**options), dtype, tuple(inputs), gradients)
        if steps.plan().route.backend.compiles:
            steps.run()


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

    def plan(self) -> Plan:
        """Return the plan of a small call, as it is asked for."""
        with torch.set_grad_enabled(self.gradients):
            return self._planned(self.head, _ONE_CHUNK, self.options)[1]

    def run(self) -> None:
        plan = self.plan()
        tile = _TILE_ROWS * plan.route.row_bytes
        options = replace(self.options, max_workspace_bytes=tile)
        # The weight stays frozen where it is whole: no (V, D) tensor is made. Two passes do the
        # same to a weight that is trained.
        frozen = _part(self.head, trained=False)
        self._step(frozen, _ONE_CHUNK, options, False)  # also of rows without an advantage
        if not self.gradients:
            return
        if options.schedule != "one_pass":
            two = replace(options, schedule="two_pass")
            if plan.needs.of_head:  # whose logits are formed again, or kept
                self._step(frozen, _CHUNKS, replace(two, activation_bytes=0))
                if options.activation_bytes:
                    self._step(_part(self.head, trained=True, depth=_THIN), _CHUNKS, two)
            else:
                self._step(frozen, _CHUNKS, two)
        if options.schedule != "two_pass" and plan.why_two_passes is None:
            # what fixes a row's bits is no other kernel
            options = replace(options, schedule="one_pass", batch_invariant=False)
            thin = _part(self.head, trained=True, depth=_THIN)
            for sequences in (_ONE_CHUNK, _CHUNKS):  # one gradient, and a sum of several
                self._step(thin, sequences, options)

    def _step(
        self, head: Head, sequences: int, options: RunOptions, gradients: bool = True
    ) -> None:
        with torch.set_grad_enabled(gradients):
            rows, plan = self._planned(head, sequences, options)
            loss = run_plan(rows, plan).loss
        if gradients:
            tensors = [x for x in (rows, *head.tensors) if x is not None and x.requires_grad]
            torch.autograd.grad(loss, tensors)

    def _planned(self, head: Head, sequences: int, options: RunOptions) -> tuple[Tensor, Plan]:
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

    def own(x: Tensor) -> Tensor:
        return x.detach()[..., :depth] if x.dim() == 2 else x.detach()

    def leaf(x: Tensor, of: Tensor) -> Tensor:
        return x.requires_grad_(trained and of.requires_grad)

    lora = head.lora
    if lora is not None:
        a, b = leaf(own(lora.a), lora.a), leaf(lora.b.detach(), lora.b)
        lora = replace(lora, a=a, b=b)
    bias = None if head.bias is None else leaf(head.bias.detach(), head.bias)
    return Head(leaf(own(head.weight), head.weight), bias, head.transform, lora)
