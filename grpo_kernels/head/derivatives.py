"""What the kernels do not differentiate, said before a wrong number can come of it.

They have first derivatives by ``torch.autograd``. The eager reference has all others, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

_ONLY = "the kernels have first derivatives by torch.autograd only; backend='reference' has more"


def check_plain(**tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor of a ``torch.func`` transform or of forward-mode autograd.

    Their tangents and batch dimensions would be lost on the way to a kernel.
    """
    if torch.compiler.is_compiling():
        # None while nothing transforms; a number stops the compiler, or its guess at one graph
        assert torch._C._functorch.maybe_current_level() is None
        return
    for name, x in tensors.items():
        if x is None:
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            raise ValueError(
                f"{name}: expected a plain tensor, got one inside a torch.func transform (grad, "
                f"vjp, jvp, vmap, ...): {_ONLY}"
            )
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise ValueError(
                f"{name}: expected a plain tensor, got one with a forward-mode tangent: {_ONLY}"
            )


def no_second_derivative(name: str) -> Callable[..., Any]:
    """The backward of a backward that has none."""

    def backward(ctx: Any, *outer: Tensor) -> Any:
        raise RuntimeError(f"{name}: second derivatives are not supported: {_ONLY}")

    return backward


def first_derivative_only(name: str) -> Callable[..., Any]:
    """Decorates ``backward(ctx, saved_tensors, *outer)`` of an ``autograd.Function``: an error says
    whose results cannot be differentiated.

    torch's ``once_differentiable`` cuts them off from the inputs: ``autograd.grad`` then finds no
    way to its error, and leaves their part out of a sum.
    """

    class Final(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gradients: tuple[Tensor | None, ...], *inputs: Tensor) -> Any:
            return gradients

        backward = staticmethod(no_second_derivative(name))

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *outer: Tensor) -> Any:
            saved = ctx.saved_tensors  # once: a checkpoint hands them out a single time
            with torch.no_grad():
                gradients = backward(ctx, saved, *outer)
            if not torch.is_grad_enabled():  # nobody asked for a graph of these
                return gradients
            inputs = [x for x in (*saved, *outer) if isinstance(x, Tensor)]
            return Final.apply(gradients, *inputs)

        return once

    return decorate
