"""torch's own checks of the torch.library ops: schema, fakes and autograd."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.library import opcheck

from grpo_kernels.backends import Wanted
from grpo_kernels.engine import (
    Rows,
    RunOptions,
    linear_logprobs_backward,
    linear_logprobs_forward,
)
from grpo_kernels.engine.kept import NOTHING
from grpo_kernels.engine.ops import _flat, _forward_call


def check_forward(rows: Rows, options: RunOptions, wanted: Wanted = Wanted()) -> None:  # noqa: B008
    """Check the op of the statistics, with the gradients that its inputs need."""
    for needs in ([False] * 5, [True, False, False, False, False], [True] * 5):
        opcheck(linear_logprobs_forward, (*_flat(rows, options), *wanted, needs))


def check_backward(
    rows: Rows,
    options: RunOptions,
    outer: tuple[Tensor | None, Tensor | None, Tensor | None],  # of logp, entropy, masked_logp
    needs: Sequence[bool],  # hidden, weight, bias and the factors of an adapter
) -> None:
    """Check the op of the gradients, for what the forward finds."""
    call = [x.detach() if isinstance(x, Tensor) else x for x in _flat(rows, options)]
    call_of_forward = (*call, *Wanted(), list(needs))
    *found, kept = linear_logprobs_forward(*call_of_forward)
    for keeps in {NOTHING, _forward_call(call_of_forward)[-1].what}:
        opcheck(linear_logprobs_backward, (*call, *found[:3], *outer, kept, keeps, list(needs)))
