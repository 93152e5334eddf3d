"""NeMo-RL's fused linear log-probabilities (Megatron) on our kernels.

    import grpo_nemo_rl  # a copy of this file, where the training processes find it

    grpo_nemo_rl.enable()  # in each of them

It takes effect if ``policy.megatron_cfg.use_fused_linear_logprobs`` is set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import linear_logprobs
from grpo_kernels.common import gather, process_group
from grpo_kernels.integrations.megatron import vocab_shard_of
from grpo_kernels.integrations.probe import Host, Probe, Replacement
from grpo_kernels.integrations.switch import Switch


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Replace NeMo-RL's function of this name: log-probabilities (B, S - 1) of next tokens.

    Args:
        tensor_parallel_hidden_states: (S, B, D), or (S / n, B, D) under sequence parallelism.
        output_weight_layer: (V / n, D), this rank's rows.
        target: (B, S) int64 ids, not shifted.
        vocab_start_index, vocab_end_index: the ids of the rows.
        tp_group: the n ranks that share the vocabulary.
        inference_only: whether no gradient is needed.
        cp_group: None, or a group of one rank.
        runtime_gather_output, chunk_size: ignored: there are no logits to gather, and the kernel
            chooses its own chunks.

    Returns:
        (B, S - 1) fp32. On each rank, the gradient of the hidden states covers its own rows and the
        whole vocabulary.

    Raises:
        ValueError: sequences are split over ranks (context parallelism), or a shape, dtype or value
            is wrong.
    """
    if cp_group is not None and dist.get_world_size(cp_group) > 1:
        raise ValueError(
            "cp_group: expected a group of one rank (targets are not whole under context "
            f"parallelism), got {dist.get_world_size(cp_group)}"
        )
    weight = output_weight_layer
    shard = vocab_shard_of(weight, tp_group, vocab_start_index, vocab_end_index)
    with torch.no_grad() if inference_only else nullcontext():
        hidden = _whole_sequence(tensor_parallel_hidden_states, target.shape[1], tp_group)
        output = linear_logprobs(hidden[:-1], weight, target[:, 1:].t(), vocab_shard=shard)
        assert output.logprobs is not None
        # not a view: NeMo-RL divides it in place
        return output.logprobs.t().clone(memory_format=torch.contiguous_format)


def _whole_sequence(hidden: Tensor, length: int, tp_group: Any) -> Tensor:
    """Return (S, B, D) hidden states from rows that may be split over the ranks (S / n, B, D).

    The gradient of the result is whole on every rank, as our ops return it; each rank keeps its
    own rows.

    Raises:
        ValueError: there are neither ``length`` rows nor a rank's share of them.
    """
    group = process_group("tp_group", tp_group)
    size = dist.get_world_size(group)
    if hidden.shape[0] == length:
        return hidden
    if hidden.shape[0] * size != length:
        raise ValueError(
            f"tensor_parallel_hidden_states: expected {length} rows (of target), or 1 / {size} of "
            f"them, got {hidden.shape[0]}"
        )
    return _WholeSequence.apply(hidden, group)


class _WholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        start = dist.get_rank(group) * part.shape[0]
        ctx.own = slice(start, start + part.shape[0])
        return gather(part, group).flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, dwhole: Tensor) -> tuple[Tensor, None]:
        return dwhole[ctx.own].contiguous(), None


def _replacements() -> Iterator[Replacement]:
    ours = from_parallel_hidden_states_to_logprobs
    yield Replacement("nemo_rl.distributed.model_utils", ours.__name__, ours, everywhere=True)


SWITCH = Switch(Probe(host=Host("nemo-rl", ("0.6",)), replacements=_replacements))
enable, disable, enabled = SWITCH.enable, SWITCH.disable, SWITCH.enabled
