"""Out of memory is met once, by less work at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")

# what says so without an exception of its own: torch's CPU allocator, a Triton launch, and cuBLAS,
# whose workspace is allocated beside torch's
_MESSAGES = (
    "can't allocate memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def retry_on_oom(
    run: Callable[[Any], Result],
    plan: Any,  # with ``smaller()``, the plan that needs less or None, and ``advice``
    not_retryable: bool = False,  # a failed try leaves a part of a sum in ``main_grad``
) -> Result:
    """Run ``plan``; where the memory does not last, what is smaller, and warn.

    What a failed try has allocated is free again before the next. The warning says what to set so
    that it does not happen again.

    Raises:
        RuntimeError: the last try's, if the memory lasts for none.
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
                    f"{error}\nmain_grad now holds a part of this call's gradient, so nothing was "
                    "tried again. Clear it before the step is repeated, with a smaller "
                    "max_workspace_bytes"
                ) from error
            following = plan.smaller()
            if following is None:
                raise
        # here, where the traceback and with it the tensors of the failed try are gone
        plan, tries = following, tries + 1
    if tries > 1:
        warnings.warn(
            f"out of memory: {'a second' if tries == 2 else 'a third'} try, with less work at a "
            f"time, went through. {plan.advice} avoids the failed one",
            RuntimeWarning,
            stacklevel=2,
        )
    return result
