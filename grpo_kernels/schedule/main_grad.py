"""The gradient of the head's weight, added to a buffer of the caller's in place of autograd's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.batch import host
from grpo_kernels.engine import MainGrad
from grpo_kernels.head import check_local, on_huge_pages, stats_dtype
from grpo_kernels.losses import check_number

_ROUNDING = 1e-6  # of a scale that was multiplied together in fp32


@dataclass(frozen=True, kw_only=True)
class MainGradBuffer:
    """The buffer, and what the loss will be multiplied with where that is known beforehand."""

    buffer: Tensor  # (V, D), of the ids in use
    gradient_scale: float | None

    def sums(self) -> MainGrad:
        """Return where a pass adds before the loss is differentiated."""
        if self.gradient_scale is not None:
            return MainGrad(self.buffer, self.gradient_scale)
        return MainGrad(on_huge_pages(torch.zeros_like(self.buffer)))

    def direct(self) -> MainGrad:
        """Return where a backward adds, whose gradients contain the loss's own."""
        return MainGrad(self.buffer)

    def filled_by(self, schedule: str) -> bool:
        """Return whether its forward adds to the buffer, before the loss is differentiated."""
        return schedule == "one_pass" and self.gradient_scale is not None

    def settle(self, sums: MainGrad, dloss: Tensor) -> None:
        """Add what a pass has left in a buffer of its own, now that ``dloss`` () is known."""
        if sums.total is not self.buffer:
            self.buffer.addcmul_(sums.total, dloss.to(sums.total.dtype))

    def watch(self, loss: Tensor) -> None:
        """Check in the backward that the scale was told right."""
        scale = self.gradient_scale
        if scale is None or not loss.requires_grad:
            return
        message = f"gradient_scale: the loss was differentiated with another factor than {scale}"

        def check(dloss: Tensor) -> None:
            host.require((dloss - scale).abs() <= _ROUNDING * abs(scale), message)

        loss.register_hook(check)


def main_grad_of(
    buffer: Tensor | None,
    gradient_scale: float | None,
    weight: Tensor,
    dtype: torch.dtype,  # of the hidden states
    columns: int,  # the ids in use; the rest of the weight's rows are padding
) -> MainGradBuffer | None:
    """Check the caller's arguments.

    Raises:
        ValueError: the buffer does not fit the weight, or nothing would be added to it.
    """
    if buffer is None:
        if gradient_scale is not None:
            raise ValueError("gradient_scale: expected None without main_grad")
        return None
    _check_buffer(buffer, weight, stats_dtype(dtype))
    if gradient_scale is not None:
        check_number("gradient_scale", gradient_scale)
        gradient_scale = float(gradient_scale)
    return MainGradBuffer(buffer=buffer[:columns], gradient_scale=gradient_scale)


def _check_buffer(buffer: Tensor, weight: Tensor, wide: torch.dtype) -> None:
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
    if buffer.dtype != wide:
        raise ValueError(f"main_grad: expected dtype {wide}, got {buffer.dtype}")
    if buffer.device != weight.device:
        raise ValueError(f"main_grad: expected device {weight.device}, got {buffer.device}")
    if buffer.requires_grad:
        raise ValueError("main_grad: expected a tensor that needs no gradient")
    if buffer.data_ptr() == weight.data_ptr() and buffer.numel():
        raise ValueError("main_grad: expected a buffer of its own, got the weight")
