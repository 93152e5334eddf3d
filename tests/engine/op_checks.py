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
from grpo_kernels.engine.ops import _flat


def check_forward(rows: Rows, options: RunOptions, wanted: Wanted = Wanted()) -> None:  # noqa: B008
    """Check the op of the statistics, with the gradients that its inputs need."""
    opcheck(linear_logprobs_forward, (*_flat(rows, options), *wanted))


def check_backward(
    rows: Rows,
    options: RunOptions,
    outer: tuple[Tensor | None, Tensor | None, Tensor | None],  # of logp, entropy, masked_logp
    needs: Sequence[bool],  # hidden, weight, bias and the factors of an adapter
) -> None:
    """Check the op of the gradients, for what the forward finds."""
    call = [x.detach() if isinstance(x, Tensor) else x for x in _flat(rows, options)]
    found = linear_logprobs_forward(*call, *Wanted())[:3]
    opcheck(linear_logprobs_backward, (*call, *found, *outer, list(needs)))
