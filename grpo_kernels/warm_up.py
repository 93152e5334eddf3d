"""warm_up: compile what a training step will launch, before the first step."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.batch import SamplingMask, TokenBatch
from grpo_kernels.head import Head, HeadLoRA, check_weight, head_of, leading_dim, unshard_head
from grpo_kernels.linear_policy_loss import explain, linear_policy_loss
from grpo_kernels.losses import LossConfig
from grpo_kernels.schedule import Plan

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

INPUTS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "rollout_weights", "sampling_mask")

_SEQUENCES, _LENGTH = 6, 4  # of tokens: more than a tile has rows
_TILE_ROWS = 16


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
    does not prepare calls inside ``torch.compile``, nor batches that are built with a mask.

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
    with _first_of_each_machine_first(group):
        unknown = sorted(set(inputs) - set(INPUTS))
        if unknown:
            raise ValueError(f"inputs: expected some of {', '.join(INPUTS)}; got {unknown[0]!r}")
        shape, device = (_SEQUENCES, _LENGTH, head.weight.shape[1]), head.weight.device
        hidden = torch.zeros(shape, dtype=dtype or head.weight.dtype, device=device)
        hidden.requires_grad_(gradients)
        batch = _batch(inputs, device)
        with torch.set_grad_enabled(gradients):
            plan = explain(hidden, head, batch, config, **options)
        if not plan.route.backend.compiles:
            return
        options["max_workspace_bytes"] = _TILE_ROWS * plan.route.row_bytes
        # frozen, so that no (V, D) tensor is made: the weight's gradient needs no other kernel than
        # that of `_scale_sums`
        others = (None if x is None else x.detach() for x in head.tensors[1:])
        frozen = head.with_tensors(head.weight.detach(), *others)
        given = hidden, frozen, batch, config
        with torch.no_grad():  # also of rows without an advantage
            linear_policy_loss(*given, **options)
        with torch.enable_grad():
            for asked in _ways(plan) if gradients else ():
                loss = linear_policy_loss(*given, **{**options, **asked}).loss
                torch.autograd.grad(loss, hidden)
        if gradients and _needs_all_rows(plan):
            _store_exponentials(plan, frozen, hidden.detach(), batch)
        elif gradients:
            _scale_sums(plan, head)


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


def _ways(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield options of steps that launch together what any step launches."""
    if plan.options.schedule != "one_pass":
        if plan.needs.of_head:  # logits formed again
            yield {"schedule": "two_pass", "activation_bytes": 0}
        if not plan.needs.of_head or plan.options.activation_bytes:  # or kept
            yield {"schedule": "two_pass"}
    runs = plan.options.schedule != "two_pass" and plan.why_two_passes is None
    if runs and not _needs_all_rows(plan):
        # what fixes a row's bits is no other kernel
        yield {"schedule": "one_pass", "batch_invariant": False}


def _needs_all_rows(plan: Plan) -> bool:
    """Return whether one pass runs with exponentials of all rows only, which a trained head has."""
    return plan.keeps and plan.scope == "batch"


def _store_exponentials(plan: Plan, head: Head, hidden: Tensor, batch: TokenBatch) -> None:
    """Launch the GEMM that stores them, and what weighs them."""
    backend, rows = plan.route.backend, hidden.flatten(0, 1)
    pitch = leading_dim(len(head.weight), rows.dtype, rows.device)
    out = rows.new_empty(len(rows), pitch)[:, : len(head.weight)]
    ready = head.to(rows.dtype)
    stats, gradient = backend.linear_logp_gradient(rows, ready, batch.target, out)
    backend.weighted_gradient(gradient, torch.ones_like(stats.logprobs))


def _scale_sums(plan: Plan, head: Head) -> None:
    """Scale gradients of the head that are summed in fp32: of one pass over several chunks."""
    if plan.options.schedule == "two_pass" or plan.why_two_passes is not None:
        return
    one = torch.ones((), device=head.weight.device)
    for dtype in {x.dtype for x in head.tensors if x is not None and x.requires_grad}:
        plan.route.backend.scaled(torch.ones_like(one), one, dtype)


def _batch(inputs: Collection[str], device: torch.device) -> TokenBatch:
    """Return one of which every token has an advantage."""
    zeros = torch.zeros(_SEQUENCES, _LENGTH, device=device)
    given: dict[str, Any] = dict.fromkeys(inputs, zeros)
    if "sampling_mask" in inputs:
        given["sampling_mask"] = SamplingMask.from_padded(zeros.long()[..., None])
    given |= dict.fromkeys(("lengths", "active_lengths"), [_LENGTH] * _SEQUENCES)
    return TokenBatch.from_padded(zeros.long(), torch.ones(_SEQUENCES, device=device), **given)
