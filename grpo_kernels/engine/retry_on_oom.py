"""Retries with smaller tiles after out-of-memory errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# messages of out-of-memory errors other than torch.OutOfMemoryError: from torch's CPU allocator, a
# Triton launch, and cuBLAS, which allocates its workspace itself
_MESSAGES = (
    "can't allocate memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def retry_on_oom(
    run: Callable[[Any], Result],
    plan: Any,  # with ``smaller()``, a plan that needs less memory or None, and ``advice``
    not_retryable: bool = False,  # a failed attempt leaves a partial sum in ``main_grad``
) -> Result:
    """Run ``plan``; on out-of-memory retry ``plan.smaller()``, and warn.

    The memory of a failed attempt is freed before the next one. The warning says what to set to
    skip the failed attempts.

    Raises:
        RuntimeError: the error of the last attempt, if all fail.
    """
    tries = 1
    while True:
        try:
            result = run(plan)
            break
        except RuntimeError as error:
            message = str(error)
            is_ours = isinstance(error, torch.OutOfMemoryError)
            if not is_ours and not any(text in message for text in _MESSAGES):
                raise
            if not_retryable:
                raise torch.OutOfMemoryError(
                    f"{error}\nmain_grad now holds a part of this call's gradient, so the call was "
                    "not retried. Clear main_grad, then repeat the step with a smaller "
                    "max_workspace_bytes"
                ) from error
            following = plan.smaller()
            if following is None:
                raise
        # outside the except block, where the traceback no longer holds the failed attempt's tensors
        plan = following
        tries = tries + 1
    if tries > 1:
        warnings.warn(
            f"out of memory: attempt {tries} succeeded with less memory; set {plan.advice} to "
            "skip the failed attempts",
            RuntimeWarning,
            stacklevel=2,
        )
    return result
