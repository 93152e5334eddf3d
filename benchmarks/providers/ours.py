"""This package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.problem import CONFIG, Problem, Result
from benchmarks.providers.base import Provider, with_gradients
from grpo_kernels import linear_logprobs, linear_policy_loss


def _loss(precision: str, backend: str) -> Callable[[Problem], Result]:
    def run(problem: Problem) -> Result:
        loss, _ = linear_policy_loss(
            problem.hidden,
            problem.weight,
            problem.batch(),
            CONFIG,
            precision=precision,
            backend=backend,
        )
        return with_gradients(problem, loss)

    return run


def _logprobs(precision: str, backend: str) -> Callable[[Problem], Tensor]:
    def run(problem: Problem) -> Tensor:
        with torch.no_grad():
            out = linear_logprobs(
                problem.hidden,
                problem.weight,
                problem.target,
                precision=precision,
                backend=backend,
            )
        assert out.logprobs is not None
        return out.logprobs

    return run


def _provider(name: str, note: str, precision: str, backend: str, **rest) -> Provider:
    return Provider(
        name=name,
        note=note,
        loss=_loss(precision, backend),
        logprobs=_logprobs(precision, backend),
        **rest,
    )


OURS = _provider(
    "ours", 'linear_policy_loss, precision="input" (logits in the input dtype)', "input", "auto"
)
OURS_EXACT = _provider(
    "ours-exact",
    'linear_policy_loss, precision="fp32" (unrounded logits; differs for 16-bit inputs only)',
    "fp32",
    "auto",
    dtypes=(torch.bfloat16,),
)
OURS_TORCH = _provider(
    "ours-chunked",
    'linear_policy_loss, backend="chunked" (row passes in torch)',
    "input",
    "chunked",
)
