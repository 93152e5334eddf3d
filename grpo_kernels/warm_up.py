"""warm_up: compile the kernels of a training step in advance."""

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

# the tokens of a small batch: more than a tile has rows
_SEQUENCES = 6
_LENGTH = 4
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
    """Compile the kernels that ``linear_policy_loss`` will launch for this head and loss.

    Runs the loss on a few rows, forward and backward, on every code path that a batch of any size
    may need. Leaves no gradients and no change in the random state. Does nothing for backends that
    do not compile, which are all except Triton. Call it under the autocast of the training step. It
    does not prepare calls inside ``torch.compile``, or batches that are built with a mask.

    Args:
        weight, bias, lora, logit_scale, softcap: the head, as for ``linear_policy_loss``; tensors
            that require a gradient there must require it here.
        config: the loss.
        dtype: dtype of the hidden states; None: the weight's.
        inputs: which of ``old_logprobs``, ``ref_logprobs``, ``rollout_logprobs``,
            ``rollout_weights`` and ``sampling_mask`` the batches will have.
        gradients: False if no call will compute gradients.
        group: processes that all call this function. On each machine the process with
            ``LOCAL_RANK`` 0 compiles while the others wait at a barrier of the group; then they
            find the kernels in Triton's cache on disk. None: this process does not wait.
        options: ``precision``, ``backend``, ``schedule``, ``max_workspace_bytes``,
            ``batch_invariant``, ``metric_rows``, as for ``linear_policy_loss``.

    Raises:
        ValueError: ``linear_policy_loss`` would raise it for such a call, an input has an unknown
            name, or there is a group but no ``LOCAL_RANK``.
    """
    if not isinstance(config, LossConfig):
        raise ValueError(f"config: expected a LossConfig, got {type(config).__name__}")
    # gathering the head is a collective: all processes must take part
    head = unshard_head(
        head_of(
            weight=weight,
            bias=bias,
            lora=lora,
            logit_scale=logit_scale,
            softcap=softcap,
            temperature=1.0,
        )
    )
    check_weight(head.weight)
    with _first_of_each_machine_first(group):
        unknown = sorted(set(inputs) - set(INPUTS))
        if unknown:
            raise ValueError(f"inputs: expected any of {', '.join(INPUTS)}; got {unknown[0]!r}")
        shape = (_SEQUENCES, _LENGTH, head.weight.shape[1])
        hidden_dtype = dtype or head.weight.dtype
        hidden = torch.zeros(shape, dtype=hidden_dtype, device=head.weight.device)
        hidden.requires_grad_(gradients)
        batch = _batch(inputs, head.weight.device)
        with torch.set_grad_enabled(gradients):
            plan = explain(hidden, head, batch, config, **options)
        if not plan.route.backend.compiles:
            return
        options["max_workspace_bytes"] = _TILE_ROWS * plan.route.row_bytes
        # frozen, so that no (V, D) tensor is allocated: the only kernels that the weight's gradient
        # adds are compiled by `_scale_sums`
        others = (None if x is None else x.detach() for x in head.tensors[1:])
        frozen = head.with_tensors(head.weight.detach(), *others)
        with torch.no_grad():  # also launches the kernels of rows without an advantage
            linear_policy_loss(hidden, frozen, batch, config, **options)
        if not gradients:
            return
        with torch.enable_grad():
            for schedule in _schedules(plan):
                out = linear_policy_loss(hidden, frozen, batch, config, **(options | schedule))
                torch.autograd.grad(out.loss, hidden)
        if _needs_all_rows(plan):
            _store_exponentials(plan, frozen, hidden.detach(), batch)
        else:
            _scale_sums(plan, head)


@contextmanager
def _first_of_each_machine_first(group: ProcessGroup | None) -> Iterator[None]:
    """Run the block in the first process of each machine, then in its other processes."""
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
    finally:  # even after a failure: the others are waiting
        if rank == "0":
            torch.distributed.barrier(group)


def _schedules(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield options of steps that together launch every kernel that a step may need."""
    if plan.options.schedule != "one_pass":
        if plan.needs.of_head:  # logits are computed again
            yield {"schedule": "two_pass", "activation_bytes": 0}
        if not plan.needs.of_head or plan.options.activation_bytes:  # something is kept instead
            yield {"schedule": "two_pass"}
    if _may_take_one_pass(plan) and not _needs_all_rows(plan):
        # batch_invariant adds no kernel
        yield {"schedule": "one_pass", "batch_invariant": False}


def _may_take_one_pass(plan: Plan) -> bool:
    return plan.options.schedule != "two_pass" and plan.why_two_passes is None


def _needs_all_rows(plan: Plan) -> bool:
    """Return whether one pass needs the exponentials of all rows at once (for a trained head)."""
    return plan.keeps and plan.scope == "batch"


def _store_exponentials(plan: Plan, head: Head, hidden: Tensor, batch: TokenBatch) -> None:
    """Launch the GEMM that stores exponentials, and the kernel that weights them."""
    backend = plan.route.backend
    rows = hidden.flatten(0, 1)
    vocabulary = len(head.weight)
    pitch = leading_dim(vocabulary, rows.dtype, rows.device)
    out = rows.new_empty(len(rows), pitch)[:, :vocabulary]
    stats, gradient = backend.linear_logp_gradient(rows, head.to(rows.dtype), batch.target, out)
    backend.weighted_gradient(gradient, torch.ones_like(stats.logprobs))


def _scale_sums(plan: Plan, head: Head) -> None:
    """Launch the scaling of head gradients, which one pass over several chunks sums in fp32."""
    if not _may_take_one_pass(plan):
        return
    one = torch.ones((), device=head.weight.device)
    for dtype in {x.dtype for x in head.tensors if x is not None and x.requires_grad}:
        plan.route.backend.scaled(torch.ones_like(one), one, dtype)


def _batch(inputs: Collection[str], device: torch.device) -> TokenBatch:
    """Return a batch in which every token has an advantage."""
    zeros = torch.zeros(_SEQUENCES, _LENGTH, device=device)
    target = zeros.long()
    fields: dict[str, Any] = dict.fromkeys(inputs, zeros)
    if "sampling_mask" in inputs:
        fields["sampling_mask"] = SamplingMask.from_padded(target[..., None])
    lengths = [_LENGTH] * _SEQUENCES
    advantages = torch.ones(_SEQUENCES, device=device)
    return TokenBatch.from_padded(
        target, advantages, lengths=lengths, active_lengths=lengths, **fields
    )
