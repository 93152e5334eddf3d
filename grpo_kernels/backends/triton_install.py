"""Whether Triton can run here, and if not why. Imports Triton only to find out."""

from __future__ import annotations

import functools
import warnings

import torch

_OLDEST = (3, 6)  # as in pyproject.toml


def unavailable() -> str | None:
    """Say why Triton cannot run here; None if it can."""
    if (why := _why_not_usable()) is not None:
        return why
    from triton import knobs

    if knobs.runtime.interpret:
        return None
    if torch.cuda.is_available():
        return _why_no_driver()
    return "no CUDA or ROCm device is present (TRITON_INTERPRET=1 runs the kernels on CPU, slowly)"


@functools.cache
def announce_absence() -> None:
    """Warn, once in a process, that tensors on a GPU take the slower pure-torch path."""
    reason = unavailable() if torch.cuda.is_available() else None
    if reason is not None:
        warnings.warn(
            f"The pure-torch path serves on the GPU, because {reason}.",
            RuntimeWarning,
            stacklevel=3,
        )


@functools.cache
def _why_not_usable() -> str | None:
    try:
        import triton
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "triton"
        return "triton is not installed" if absent else f"triton cannot be imported: {error}"
    major, minor, *_ = triton.__version__.split(".")
    if (int(major), int(minor)) >= _OLDEST:
        return None
    oldest = ".".join(map(str, _OLDEST))
    return f"expected triton {oldest} or newer, got {triton.__version__}"


@functools.cache
def _why_no_driver() -> str | None:
    from triton.runtime import driver

    try:
        _ = driver.active
    except Exception as error:  # Triton for another platform, no C compiler, no libcuda: any kind
        return f"triton has no driver for this device: {error}"
    return None
