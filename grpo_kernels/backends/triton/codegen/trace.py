"""Compiles a torch function of (T,) vectors into one Triton kernel.

The function is traced, with any ``torch.autograd.grad`` inside of it, and the trace is written as
Triton source. So a loss and its derivative run in one launch without a second, hand-written copy.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import linecache
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from grpo_kernels.backends.triton.codegen.expressions import UntraceableError
from grpo_kernels.backends.triton.codegen.generate import KERNEL_NAME, generate_kernel

PointwiseFunction = Callable[..., tuple[Tensor, ...]]

_BLOCK = 1024
_NUM_WARPS = 4
# Two lengths that no loss contains: a trace that differs between them depends on the length.
_TRACE_LENGTHS = (7, 11)
# Python reads a value: branches on it, indexes with it, makes a shape of it
_DATA_DEPENDENT = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    GuardOnDataDependentSymNode,
)


@dataclass(frozen=True)
class PointwiseKernel:
    """A generated kernel. Build one with :meth:`trace` and call it like its torch function."""

    source: str  # Triton
    input_names: tuple[str, ...]
    output_dtypes: tuple[torch.dtype, ...]

    @classmethod
    def trace(
        cls, fn: PointwiseFunction, num_inputs: int, names: Sequence[str] | None = None
    ) -> PointwiseKernel:
        """Trace ``fn(*inputs)`` on fp32 vectors.

        Args:
            fn: takes ``num_inputs`` fp32 (T,) tensors and returns a tuple of (T,) tensors, each
                elementwise in the inputs. Python numbers that it closes over are constants.
            num_inputs: how many.
            names: identifiers of the inputs in the generated source.

        Raises:
            UntraceableError: ``fn`` reduces, changes shapes, reads values in Python, closes over
                tensors, or uses an operation without a rendering; the message names it.
        """
        names = tuple(names or (f"in{index}" for index in range(num_inputs)))
        usable = [n for n in names if n.isidentifier() and not re.fullmatch(r"out\d+", n)]
        if len(set(usable)) != num_inputs or len(names) != num_inputs:
            raise ValueError(
                f"names: expected {num_inputs} distinct identifiers other than out0, out1, ...; "
                f"got {names}"
            )
        graphs = [_trace(fn, num_inputs, length) for length in _TRACE_LENGTHS]
        source, other = (
            generate_kernel(graph, names, length)
            for graph, length in zip(graphs, _TRACE_LENGTHS, strict=True)
        )
        if source != other:
            raise UntraceableError("the function depends on the length of its inputs")
        (results,) = list(graphs[0].graph.nodes)[-1].args
        return cls(source, names, tuple(node.meta["val"].dtype for node in results))

    @property
    def kernel(self) -> Any:
        """The ``triton.jit`` kernel of :attr:`source`, which loads, computes and stores."""
        return getattr(_load(self.source), KERNEL_NAME)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run on (T,) fp32 tensors of one CUDA device (or of the CPU, interpreted)."""
        inputs = self._checked(inputs)
        outputs = tuple(torch.empty_like(inputs[0], dtype=dtype) for dtype in self.output_dtypes)
        length = inputs[0].numel()
        if not length:
            return outputs
        arguments = {f"{k}_ptr": v for k, v in zip(self.input_names, inputs, strict=True)}
        arguments |= {f"out{index}_ptr": output for index, output in enumerate(outputs)}
        with _on_device(inputs[0]):
            # without fusion of a * b + c every operation rounds as torch's does
            self.kernel[(-(-length // _BLOCK),)](
                **arguments,
                length=length,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
                enable_fp_fusion=False,
            )
        return outputs

    def _checked(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if len(inputs) != len(self.input_names):
            raise ValueError(f"inputs: expected {len(self.input_names)}, got {len(inputs)}")
        shape, device = inputs[0].shape, inputs[0].device
        for name, value in zip(self.input_names, inputs, strict=True):
            ok = value.dim() == 1 and value.shape == shape and value.device == device
            if not ok or value.dtype != torch.float32:
                raise ValueError(
                    f"{name}: expected ({', '.join(map(str, shape))},) torch.float32 on {device}, "
                    f"got {tuple(value.shape)} {value.dtype} on {value.device}"
                )
        return tuple(value.detach().contiguous() for value in inputs)


def _trace(fn: PointwiseFunction, num_inputs: int, length: int) -> GraphModule:
    """Return the graph of core aten operations, with the fake results in ``node.meta["val"]``."""
    trace = make_fx(
        _outputs_of(fn),
        decomposition_table=dict(core_aten_decompositions()),
        tracing_mode="fake",
        # a tensor that fn closes over becomes a node, which the generator refuses by name
        _allow_non_fake_inputs=True,
    )
    try:
        # whatever the caller's mode: fn may differentiate, which a checkpoint around must not count
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_same, _same):
            return trace(*(torch.empty(length) for _ in range(num_inputs)))
    except _DATA_DEPENDENT as error:
        raise UntraceableError(f"the function's path depends on values: {error}") from error


def _same(x: Tensor) -> Tensor:
    return x


def _outputs_of(fn: PointwiseFunction) -> PointwiseFunction:
    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = fn(*inputs)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    return outputs


@functools.cache
def _load(source: str) -> types.ModuleType:
    """Load a generated module, built once per content."""
    name = f"grpo_kernels_pointwise_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = f"<{name}>"
    # triton.jit reads the source back through inspect, which asks linecache
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    exec(compile(source, filename, "exec"), module.__dict__)
    return module


def _on_device(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    if tensor.device.type == "cpu":
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)
