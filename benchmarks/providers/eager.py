"""Full logits and autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.problem import CONFIG, Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from grpo_kernels import policy_loss


def _loss(problem: Problem) -> Result:
    loss, _ = policy_loss(_selected(_logps(problem), problem), problem.batch(), CONFIG)
    return with_gradients(problem, loss)


def _loss_with_entropy(problem: Problem) -> Result:
    logps = _logps(problem)
    with torch.no_grad():
        entropy = -(logps.exp() * logps).sum(-1).flatten()
    loss, _ = policy_loss(_selected(logps, problem), problem.batch(), CONFIG, entropy)
    return with_gradients(problem, loss)


def _logprobs(problem: Problem) -> Tensor:
    with torch.no_grad():
        return _selected(_logps(problem), problem).view(problem.target.shape)


def _logps(problem: Problem) -> Tensor:
    logits = torch.nn.functional.linear(problem.hidden, problem.weight)  # (B, L, V)
    return logits.log_softmax(-1, dtype=torch.float32)


def _selected(logps: Tensor, problem: Problem) -> Tensor:
    return logps.gather(-1, problem.target.unsqueeze(-1)).flatten()


EAGER = Provider(
    name="eager",
    note="full logits, fp32 log_softmax, autograd; no entropy",
    loss=_loss,
    logprobs=_logprobs,
)
EAGER_ENTROPY = Provider(
    name="eager-entropy",
    note="the same, and the mean entropy for the log, which ours and trl also compute",
    loss=_loss_with_entropy,
)
