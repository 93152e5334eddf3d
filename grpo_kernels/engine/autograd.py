"""The autograd function of every call at a head: log-probabilities, a policy loss, a divergence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from grpo_kernels.engine.rows import Gradients
from grpo_kernels.head import check_plain, first_derivative_only

INPUTS = ("hidden", "weight", "bias", "lora.a", "lora.b")
Tensors = Sequence[Tensor | None]
Call = TypeVar("Call", bound="HeadCall")


class Forward(NamedTuple):
    """The result of the forward of a :class:`HeadCall`."""

    outputs: tuple[Tensor | None, ...]
    constants: Tensors  # the outputs that are not differentiable
    saved: Tensors = ()  # tensors that autograd saves for the backward
    gradients: Gradients | None = None  # of the first output, if the forward computes them


class HeadCall(ABC):
    """A differentiable call at a head.

    Between forward and backward only autograd holds the tensors. Another reference would keep their
    memory alive under checkpointing and under hooks that offload saved tensors.
    """

    name: ClassVar[str]  # of the public function, for messages

    @property
    @abstractmethod
    def inputs(self) -> Tensors:
        """The tensors named by :data:`INPUTS`, which may get a gradient."""

    @property
    @abstractmethod
    def guarded(self) -> Tensors:
        """Tensors without a gradient that must not change in place before the backward."""

    @abstractmethod
    def without_tensors(self: Call) -> Call:
        """Return the same call with empty :attr:`inputs`."""

    @abstractmethod
    def with_tensors(self: Call, inputs: Sequence[Any], guarded: Sequence[Any]) -> Call:
        """Return the same call with these :attr:`inputs` and :attr:`guarded` tensors."""

    @abstractmethod
    def forward(self) -> Forward: ...

    @abstractmethod
    def backward(
        self, saved: Sequence[Any], gradients: Gradients | None, grad_outputs: Sequence[Any]
    ) -> Gradients:
        """Return the gradients of the inputs.

        ``gradients`` come from the forward; the first backward consumes them.
        """


class _AtHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: HeadCall, *inputs: Tensor | None) -> Any:
        result = call.forward()
        ctx.call = call.without_tensors()
        ctx.gradients = result.gradients
        ctx.num_saved = len(result.saved)
        ctx.result_of = call.name
        ctx.save_for_backward(*inputs, *result.saved, *call.guarded)
        ctx.mark_non_differentiable(*(x for x in result.constants if x is not None))
        ctx.set_materialize_grads(False)  # without a gradient of the entropy, no logits are needed
        return result.outputs

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, tensors: Any, *grad_outputs: Tensor | None) -> Any:
        end_inputs = len(INPUTS)
        end_saved = end_inputs + ctx.num_saved
        inputs = tensors[:end_inputs]
        call = ctx.call.with_tensors(inputs, tensors[end_saved:])
        # the first backward takes ownership of the gradients, so the largest is never copied
        unscaled = ctx.gradients
        ctx.gradients = None
        gradients = call.backward(tensors[end_inputs:end_saved], unscaled, grad_outputs)
        pairs = zip(gradients, inputs, strict=True)
        return None, *(None if dx is None else dx.to(x.dtype) for dx, x in pairs)


def apply(call: HeadCall) -> Any:
    """Run a call and return its differentiable outputs."""
    inputs = call.inputs
    check_plain(**dict(zip(INPUTS, inputs, strict=True)))
    return _AtHead.apply(call, *inputs)
