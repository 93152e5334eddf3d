"""Divergences of a student's distribution from a teacher's, each defined once.

With ``s`` and ``t`` the probabilities and ``m = (1 - beta) s + beta t``:

* ``forward_kl``: KL(t, s) = sum_j t_j log(t_j / s_j)
* ``reverse_kl``: KL(s, t) = sum_j s_j log(s_j / t_j)
* ``jsd``: beta KL(t, m) + (1 - beta) KL(s, m), the generalized Jensen-Shannon divergence of
  arXiv:2306.13649

The gradient with respect to the student's scores is ``g_j - s_j sum_k g_k``, where ``g_j``, the
``logp_grad`` of an id, is the derivative with respect to ``log s_j``. Probability 0 counts as
``exp(-1e4)``. ``triton/divergence.py`` and ``csrc/divergence-inl.h`` mirror these definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.base import LEAST_LOGP, Tile


def _forward_kl(logp: Tensor, teacher_logp: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    t = teacher_logp.exp()
    return t * (teacher_logp - logp), -t


def _reverse_kl(logp: Tensor, teacher_logp: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    each = logp.exp() * (logp - teacher_logp)
    return each, each


def _jsd(logp: Tensor, teacher_logp: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    # log(s / m) and log(t / m) from the larger of the two, so a ratio near 1 keeps its digits
    delta = teacher_logp - logp
    is_more = delta > 0
    zero = torch.zeros_like(delta)
    size = torch.where(is_more, delta, -delta)
    weight = torch.where(is_more, zero + (1 - beta), zero + beta)
    below = -torch.log1p(weight * torch.expm1(-size))
    logp_grad = (1 - beta) * logp.exp() * (below - torch.where(is_more, size, zero))
    each = logp_grad + beta * teacher_logp.exp() * (below - torch.where(is_more, zero, size))
    return each, logp_grad


# kernels identify a kind by its position
KINDS = {"forward_kl": _forward_kl, "reverse_kl": _reverse_kl, "jsd": _jsd}


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The kind of divergence; ``beta`` is for ``jsd``."""

    kind: str = "forward_kl"
    beta: float = 0.5

    @property
    def index(self) -> int:
        """The number of the kind."""
        return list(KINDS).index(self.kind)

    def terms(self, logp: Tensor, teacher_logp: Tensor) -> tuple[Tensor, Tensor]:
        """Return each id's term of the divergence, and its ``logp_grad``; all of one shape.

        The log-probabilities must be at least :data:`LEAST_LOGP`.
        """
        return KINDS[self.kind](logp, teacher_logp, self.beta)


class Pair(NamedTuple):
    """The same rows and columns of a student's and a teacher's logits."""

    student: Tile
    teacher: Tile  # its target is not read
    lse: Tensor  # (C,) fp64, of whole rows
    teacher_lse: Tensor  # (C,) fp64

    def rows(self, index: slice) -> Pair:
        """Return the same for a range of rows."""
        student, teacher = self.student.rows(index), self.teacher.rows(index)
        return Pair(student, teacher, self.lse[index], self.teacher_lse[index])


class TopK(NamedTuple):
    """A teacher's first k ids of each row; the other ids count as one, the tail."""

    logprobs: Tensor  # (T, k), descending
    indices: Tensor  # (T, k) int64

    @property
    def inputs(self) -> tuple[Tensor, Tensor]:
        """The tensors that a backward needs, as for rows."""
        return self.logprobs, self.indices

    def with_inputs(self, logprobs: Tensor, indices: Tensor) -> TopK:
        """Return the same object with these :attr:`inputs`."""
        return TopK(logprobs, indices)

    def without_inputs(self) -> TopK:
        """Return the same object with empty :attr:`inputs`, which keep no memory alive."""
        return TopK(self.logprobs.new_empty((0, 0)), self.indices.new_empty((0, 0)))

    @property
    def with_tail(self) -> Tensor:
        """(T, k + 1) log-probabilities in fp64; the last column is the tail."""
        logp = self.logprobs.double()
        tail = torch.log1p(-logp.exp().sum(-1, keepdim=True).clamp(max=1))
        return torch.cat([logp, tail], -1).clamp(min=LEAST_LOGP)

    def select(self, index: slice | Tensor) -> TopK:
        """Return the same for a subset of rows."""
        return TopK(self.logprobs[index], self.indices[index])
