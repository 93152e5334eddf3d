"""Compiles a torch function of (T,) vectors into one Triton kernel.

The function is traced, including any ``torch.autograd.grad`` inside it, and the trace is written as
Triton source. So a loss and its derivative run in one launch without a hand-written copy.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch._subclasses import fake_tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from grpo_kernels.backends.triton.codegen.expressions import (
    TRITON_DTYPES,
    VIEWS,
    UntraceableError,
    literal,
    operation_name,
    render,
    schema_of,
    value_of,
)
from grpo_kernels.backends.triton.common import OPTIONS

PointwiseFunction = Callable[..., tuple[Tensor, ...]]

_BLOCK = 1024
# Two lengths that occur in no loss: if the traces differ, the function depends on the length.
_TRACE_LENGTHS = (7, 11)
KERNEL_NAME = "_pointwise_kernel"
_TEMPLATE = """\
import triton
import triton.language as tl

from grpo_kernels.backends.triton import math as tm


@triton.jit(
    do_not_specialize=["length"],  # a new length or slice does not recompile
    do_not_specialize_on_alignment=[{quoted}],
)
def {name}({pointers}, length, BLOCK: tl.constexpr):
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask_t = offs_t < length
    {lines}
"""


@dataclass(frozen=True)
class PointwiseKernel:
    """A generated kernel. Build one with :meth:`trace` and call it like its torch function."""

    source: str  # Triton
    input_names: tuple[str, ...]
    output_dtypes: tuple[torch.dtype, ...]

    @classmethod
    def trace(cls, fn: PointwiseFunction, names: tuple[str, ...]) -> PointwiseKernel:
        """Trace ``fn(*inputs)``, a tuple of (T,) vectors, each elementwise in (T,) fp32 ones.

        Python numbers that ``fn`` closes over are constants; the ``names`` of the inputs are those
        in the generated source.

        Raises:
            UntraceableError: ``fn`` reduces, changes shapes, reads values in Python, closes over
                tensors, or uses an operation without a rendering; the message names it.
        """
        graphs = [_trace(fn, len(names), length) for length in _TRACE_LENGTHS]
        kernel, other = map(_source, graphs, [names] * 2, _TRACE_LENGTHS)
        if kernel != other:
            raise UntraceableError("the function depends on the length of its inputs")
        return cls(kernel[0], names, kernel[1])

    @property
    def kernel(self) -> Any:
        """The ``triton.jit`` kernel of :attr:`source`, which loads, computes and stores."""
        return getattr(_load(self.source), KERNEL_NAME)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run on (T,) fp32 tensors of one CUDA device (or of the CPU, interpreted)."""
        like = inputs[0].shape, torch.float32, inputs[0].device
        assert all((x.shape, x.dtype, x.device) == like for x in inputs), inputs
        inputs = tuple(x.contiguous() for x in inputs)
        outputs = tuple(torch.empty_like(inputs[0], dtype=dtype) for dtype in self.output_dtypes)
        arguments = {f"{k}_ptr": v for k, v in zip(self.input_names, inputs, strict=True)}
        arguments |= {f"out{index}_ptr": output for index, output in enumerate(outputs)}
        if length := inputs[0].numel():
            with torch.cuda.device_of(inputs[0]):
                grid = (-(-length // _BLOCK),)
                self.kernel[grid](**arguments, length=length, BLOCK=_BLOCK, **OPTIONS)
        return outputs


def _trace(fn: PointwiseFunction, num_inputs: int, length: int) -> Graph:
    """Return the graph of core aten operations, with fake results in ``node.meta["val"]``."""

    def same(x: Tensor) -> Tensor:
        return x

    trace = make_fx(
        fn,
        decomposition_table=dict(core_aten_decompositions()),
        tracing_mode="fake",
        # a tensor that fn closes over becomes a node, which raises an error with its name
        _allow_non_fake_inputs=True,
    )
    try:
        # independent of the caller's mode: fn may differentiate, and a checkpoint must not count it
        with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(same, same):
            return trace(*(torch.empty(length) for _ in range(num_inputs))).graph
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    ) as error:  # Python branches on a value, indexes with it, or uses it as a shape
        raise UntraceableError(f"the function's path depends on values: {error}") from error


def _source(
    graph: Graph, input_names: Sequence[str], length: int
) -> tuple[str, tuple[torch.dtype, ...]]:
    """Return the Triton module for a graph's outputs, and their dtypes."""
    (results,) = next(iter(reversed(graph.nodes))).args
    for index, node in enumerate(results):
        value = node.meta.get("val") if isinstance(node, Node) else node
        if not isinstance(value, Tensor) or value.shape != (length,):
            shape = tuple(value.shape) if isinstance(value, Tensor) else value
            raise UntraceableError(f"output {index}: expected a (T,) vector, got {shape}")
    _refuse_shared_mutation(graph)
    needed = _needed(graph, results)
    inputs = (node for node in graph.nodes if node.op == "placeholder")
    names: dict[Node, str] = dict(zip(inputs, input_names, strict=True))
    lines = [f"{x} = tl.load({x}_ptr + offs_t, mask=mask_t)" for x in input_names]
    variables: dict[str, str] = {}  # expression -> the variable that holds it

    def operand(value: Any, dtype: torch.dtype) -> str:
        """Return an argument's text: a variable, converted if its dtype differs, or a number."""
        if not isinstance(value, Node):
            return literal(value, dtype)
        name = names[value]
        own = value_of(value).dtype
        if own == dtype:
            return name
        return f"({name} != 0)" if dtype == torch.bool else f"{name}.to({TRITON_DTYPES[dtype]})"

    for node in graph.nodes:
        if node not in needed or node in names:
            continue
        shape = tuple(value_of(node).shape)
        if shape not in ((), (length,)):
            raise UntraceableError(f"{node.target}: its result of shape {shape} is not (T,)")
        expression = render(node, operand)
        if expression not in variables:  # copies and repeated expressions add no line
            name = f"v{len(lines) - len(input_names)}"
            lines.append(f"{name} = {expression}")
            variables[name] = variables[expression] = name
        names[node] = variables[expression]
    outputs = [f"out{index}" for index in range(len(results))]
    lines += [
        f"tl.store({x}_ptr + offs_t, {names[node]}, mask=mask_t)"
        for x, node in zip(outputs, results, strict=True)
    ]
    pointers = [f"{name}_ptr" for name in (*input_names, *outputs)]
    source = _TEMPLATE.format(
        name=KERNEL_NAME,
        pointers=", ".join(pointers),
        quoted=", ".join(f'"{pointer}"' for pointer in pointers),
        lines="\n    ".join(lines),
    )
    return source, tuple(node.meta["val"].dtype for node in results)


def _refuse_shared_mutation(graph: Graph) -> None:
    """Raise if an in-place operation changes memory that a view or the caller's input shares."""
    # on unshared memory it is fine: in the trace, later readers get the changed value
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            changed = node.args[0] if schema_of(node).is_mutable else None
            if not isinstance(changed, Node):
                continue
            sharing = [x for x in (changed, *changed.users) if x.op == "call_function"]
            viewed = any(operation_name(x) in VIEWS for x in sharing)
            if changed.op != "call_function" or viewed:
                raise UntraceableError(f"{node.target}: in place on an input or a shared value")


def _needed(graph: Graph, outputs: Sequence[Node]) -> set[Node]:
    """Return the nodes with values that reach an output."""
    needed = set(outputs)
    for node in reversed(graph.nodes):  # readers come first
        if node in needed and node.op != "placeholder":
            name = operation_name(node)
            # a node used only for its shape is skipped: the sum before a backward isn't generated
            if not name.startswith("new_") and not name.endswith("_like"):
                needed.update(node.all_input_nodes[name == "copy" :])
    return needed


@functools.cache
def _load(source: str) -> types.ModuleType:
    """Load a generated module, built once per content."""
    name = f"grpo_kernels_pointwise_{hashlib.sha256(source.encode()).hexdigest()[:16]}"
    filename = f"<{name}>"
    # triton.jit reads the source through inspect, which uses linecache
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(name)
    exec(compile(source, filename, "exec"), module.__dict__)
    return module
