"""warm_up: compile what a training step will launch, before the first step."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.batch import SamplingMask, TokenBatch
from grpo_kernels.head import Head, HeadLoRA, check_weight, head_of, unshard_head
from grpo_kernels.linear_policy_loss import explain, linear_policy_loss
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import Plan

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
    # by all processes at once
    head = unshard_head(head_of(weight, bias, lora, logit_scale, softcap, 1.0))
    check_weight(head.weight)

    def arguments(part: Head, sequences: int) -> tuple[Tensor, Head, TokenBatch, LossConfig]:
        shape, device = (sequences, _LENGTH, part.weight.shape[1]), part.weight.device
        hidden = torch.zeros(shape, dtype=dtype or part.weight.dtype, device=device)
        hidden.requires_grad_(torch.is_grad_enabled())
        return hidden, part, _batch(inputs, sequences, device), config

    with _first_of_each_machine_first(group):
        unknown = sorted(set(inputs) - set(INPUTS))
        if unknown:
            raise ValueError(f"inputs: expected some of {', '.join(INPUTS)}; got {unknown[0]!r}")
        with torch.set_grad_enabled(gradients):
            plan = explain(*arguments(head, _ONE_CHUNK), **options)
        if not plan.route.backend.compiles:
            return
        options["max_workspace_bytes"] = _TILE_ROWS * plan.route.row_bytes
        with torch.no_grad():  # also of rows without an advantage
            linear_policy_loss(*arguments(_part(head, trained=False), _ONE_CHUNK), **options)
        with torch.enable_grad():
            for part, sequences, asked in _steps(head, plan) if gradients else ():
                given = arguments(part, sequences)
                loss = linear_policy_loss(*given, **{**options, **asked}).loss
                trained = [x for x in (given[0], *part.tensors) if x is not None]
                torch.autograd.grad(loss, [x for x in trained if x.requires_grad])


@contextmanager
def _first_of_each_machine_first(group: ProcessGroup | None) -> Iterator[None]:
    """Let the block run in the first process of a machine, then in its others."""
    if group is None:
        yield
        return
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        raise ValueError("group: expected LOCAL_RANK in the environment, as torchrun sets it")
    if rank != "0":
        torch.distributed.barrier(group)
    try:
        yield
    finally:  # nobody waits for a process that failed, be it before it compiled anything
        if rank == "0":
            torch.distributed.barrier(group)


def _steps(head: Head, plan: Plan) -> Iterator[tuple[Head, int, dict[str, Any]]]:
    """Yield head, sequences and options of steps that launch together what any step launches."""
    # The weight stays frozen where it is whole: no (V, D) tensor is made. Two passes do the same
    # to a weight that is trained.
    frozen, thin = _part(head, trained=False), _part(head, trained=True, depth=_THIN)
    if plan.options.schedule != "one_pass":
        two: dict[str, Any] = {"schedule": "two_pass"}
        yield frozen, _CHUNKS, two | ({"activation_bytes": 0} if plan.needs.of_head else {})
        if plan.needs.of_head and plan.options.activation_bytes:  # logits formed again, or kept
            yield thin, _CHUNKS, two
    if plan.options.schedule != "two_pass" and plan.why_two_passes is None:
        # what fixes a row's bits is no other kernel
        one = {"schedule": "one_pass", "batch_invariant": False}
        yield thin, _ONE_CHUNK, one  # one gradient
        yield thin, _CHUNKS, one  # a sum of several


def _batch(inputs: Collection[str], sequences: int, device: torch.device) -> TokenBatch:
    """Return one of which every token has an advantage."""
    zeros = torch.zeros(sequences, _LENGTH, device=device)
    given: dict[str, Any] = dict.fromkeys(inputs, zeros)
    if "sampling_mask" in inputs:
        given["sampling_mask"] = SamplingMask.from_padded(zeros.long()[..., None])
    given |= dict.fromkeys(("lengths", "active_lengths"), [_LENGTH] * sequences)
    return TokenBatch.from_padded(zeros.long(), torch.ones(sequences, device=device), **given)


def _part(head: Head, trained: bool, depth: int | None = None) -> Head:
    """Return the same head on the first ``depth`` columns, apart from autograd's graph."""
    parts: Any = ((..., slice(depth)), ...) * 2
    weight, *others = (
        None if x is None else x.detach()[part].requires_grad_(trained and x.requires_grad)
        for x, part in zip(head.tensors, parts, strict=True)
    )
    assert weight is not None
    return head.with_tensors(weight, *others)
