"""What several hosts have alike: a weight beside hidden states, distillation by a beta."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_kernels.head import Head, autocast_dtype
from grpo_kernels.linear_divergence import LinearDivergence, linear_divergence

_AT_THE_ENDS: dict[float, str] = {0: "forward_kl", 1: "reverse_kl"}


def in_dtype_of(hidden: Tensor, head: Head) -> Head:
    """Return the head in the dtype of the hidden states, unless autocast chooses one."""
    if autocast_dtype(hidden.device) is not None:
        return head
    return replace(head, weight=head.weight.to(hidden.dtype))


def divergence_of(
    beta: float, hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher: Head, **options: Any
) -> LinearDivergence:
    """Compute the generalised JSD of a ``beta``, arXiv:2306.13649, from a teacher that is fixed.

    At its ends, where that is 0, hosts have KL(teacher, student) for 0 and the reverse for 1.
    """
    kind = _AT_THE_ENDS.get(beta)
    options |= {"kind": "jsd", "beta": beta} if kind is None else {"kind": kind}
    bias = None if teacher.bias is None else teacher.bias.detach()
    teacher = replace(teacher, weight=teacher.weight.detach(), bias=bias)
    heads = in_dtype_of(hidden, head), in_dtype_of(teacher_hidden, teacher)
    return linear_divergence(hidden, heads[0], teacher_hidden.detach(), heads[1], **options)
