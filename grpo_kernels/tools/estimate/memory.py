"""Peak memory of a head's loss, forward and backward: eager, TRL's chunked head and ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from grpo_kernels.engine import Bounded, Keeping
from grpo_kernels.schedule import adding_costs_more
from grpo_kernels.tools.estimate.call import WIDE, Call, HeadShape
from grpo_kernels.tools.estimate.ours import one_pass, one_pass_call, two_pass

# trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE, trl.trainer.utils._CHUNKED_LOGPROB_CHUNK_SIZE
_TRL_ROWS, _TRL_COLUMNS = 4096, 32768


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak of one forward and backward."""

    inputs: int  # hidden states and weight
    returned: int  # their gradients
    extra: int  # what else is alive at the peak
    shards: int = 0  # of the weight and its gradient, beside the whole ones

    @property
    def growth(self) -> int:
        """Bytes from the inputs alone to the peak."""
        return self.returned + self.extra

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.shards + self.inputs + self.growth


def _eager(call: Call) -> int:
    """Estimate full logits: ``F.linear``, ``log_softmax(dtype=float32)``, ``gather``, autograd."""
    head, elements = call.head, call.tokens * call.head.vocabulary
    logits, wide = elements * head.width, elements * WIDE
    base = head.cast + call.library(head.width == WIDE)  # autocast keeps its copy to the end
    tanh = logits if head.softcap else 0  # saved for the backward
    # only CUDA's fp16 kernel writes the gradient of its input in 16 bits
    converts = head.dtype == torch.float16 and not call.on_cpu
    gradients = (call.tokens * head.hidden + head.trained) * head.width
    return base + max(
        # the log-softmax, its gradient (zeros but for the targets), the gradient of its input
        tanh + 2 * wide + (logits if converts else wide),
        logits + gradients,
        gradients + (head.trained * WIDE if head.cast else 0),  # the weight's in two dtypes
    )


def _trl(call: Call) -> int:
    """Estimate the backward of ``ChunkedLogProbFunction``: tiles of logits, fp32 gradient sums."""
    head, hidden = call.head, call.tokens * call.head.hidden
    rows, columns = min(call.tokens, _TRL_ROWS), min(head.vocabulary, _TRL_COLUMNS)
    several = call.tokens > rows or head.vocabulary > columns
    # of the weight, cast: the slice in use, and the one before it while this one is made
    slices = (1 + several) * columns * head.hidden * head.width if head.cast else 0
    sums = (hidden + head.trained) * WIDE
    base = sums + rows * _TRL_COLUMNS * head.width + slices + call.library(fp32_gemms=True)
    rounded = [(hidden, head.width), (head.trained, head.weight_width)]
    peak = sum(size * width for size, width in rounded if width < WIDE)
    if call.on_cpu:  # in fp32: the scores, softmaxes and gradients of a tile, and a flag
        peak = max(peak, rows * columns * (WIDE * (7 + head.softcap) + 1))
    return base + peak


_PEAKS = {"eager": _eager, "trl": _trl, "one_pass": one_pass, "two_pass": two_pass}


def estimate_memory(
    name: str,
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    precision: str = "fp32",
    max_workspace_bytes: int | None = None,
    activation_bytes: int | None = None,
    bounded: Bounded | None = None,
    sums_dhidden: bool = False,
) -> MemoryEstimate:
    """Estimate the peak memory of a loss of ``tokens`` valid tokens, all with a gradient.

    Vectors of one value per token are left out, and on a GPU the workspaces of libraries.

    Args:
        name: "eager", "trl", or a schedule of ours: "one_pass" or "two_pass".
        head: the shape.
        tokens: T.
        device: "cpu" (resident memory) or "cuda" (the caching allocator's).
        precision: as in ``linear_policy_loss``; of ours only.
        max_workspace_bytes: likewise.
        activation_bytes: as in ``linear_policy_loss``; of two passes.
        bounded: the bounded ``backward``; of ours only.
        sums_dhidden: whether the head is a part of a vocabulary, and the gradients of the hidden
            states are summed over the ranks that share it; of ours only.

    Raises:
        ValueError: a number or name is out of range; the message names the argument.
    """
    if name not in _PEAKS:
        raise ValueError(f"name: expected one of {', '.join(_PEAKS)}; got {name!r}")
    call = Call(
        head=head,
        tokens=tokens,
        device=device,
        precision=precision,
        max_workspace_bytes=max_workspace_bytes,
        activation_bytes=activation_bytes,
        bounded=bounded,
        sums_dhidden=sums_dhidden,
    )
    inputs = tokens * head.hidden * head.width + head.size * head.weight_width
    returned = sum(call.returned)
    return MemoryEstimate(inputs, returned, max(0, _PEAKS[name](call) - returned))


def what_is_kept(name: str, head: HeadShape, tokens: int, **options: Any) -> Keeping:
    """Return what a schedule of ours keeps; the arguments are those of ``estimate_memory``."""
    call = Call(head=head, tokens=tokens, **options)
    if name == "one_pass" and call.bounded is not None:
        return call.keeping.of_one_pass(call.needs, call.bounded)
    return call.keeping


def default_schedule(
    head: HeadShape,
    tokens: int,
    *,
    device: str = "cuda",
    precision: str = "fp32",
) -> str:
    """Return what ``schedule="auto"`` takes for a loss of token scope."""
    call = one_pass_call(Call(head=head, tokens=tokens, device=device, precision=precision))
    num_chunks = -(-tokens // call.height)
    costly = not head.frozen and adding_costs_more(device, head.dtype, tokens, num_chunks)
    return "two_pass" if costly else "one_pass"
