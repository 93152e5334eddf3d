"""The gradient of the head's weight, added to a buffer of the caller's in place of autograd's."""

from __future__ import annotations

from torch import Tensor

from grpo_kernels.head import check_local, stats_dtype


def checked_main_grad(buffer: Tensor, weight: Tensor, hidden: Tensor, vocab_size: int) -> Tensor:
    """Return the rows of the caller's buffer that ids in use have; further ones are padding.

    Raises:
        ValueError: the buffer does not fit the weight, or nothing would be added to it.
    """
    if not isinstance(buffer, Tensor):
        raise ValueError(f"main_grad: expected a tensor, got {type(buffer).__name__}")
    check_local("main_grad", buffer)
    if not weight.requires_grad:
        raise ValueError("main_grad: expected None for a weight that needs no gradient")
    if buffer.shape != weight.shape or not buffer.is_contiguous():
        kind = "one" if buffer.is_contiguous() else "a non-contiguous one"
        raise ValueError(
            f"main_grad: expected a contiguous tensor of shape {tuple(weight.shape)} (of "
            f"weight), got {kind} of {tuple(buffer.shape)}"
        )
    wide = stats_dtype(hidden.dtype)
    if buffer.dtype != wide:
        raise ValueError(f"main_grad: expected dtype {wide}, got {buffer.dtype}")
    if buffer.device != weight.device:
        raise ValueError(f"main_grad: expected device {weight.device}, got {buffer.device}")
    if buffer.requires_grad:
        raise ValueError("main_grad: expected a tensor that needs no gradient")
    if buffer.data_ptr() == weight.data_ptr() and buffer.numel():
        raise ValueError("main_grad: expected a buffer of its own, got the weight")
    return buffer[:vocab_size]
