"""Generates a Triton kernel from a traced graph of pointwise operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

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

KERNEL_NAME = "_pointwise_kernel"

_TEMPLATE = """\
import triton
import triton.language as tl

from grpo_kernels.backends.triton import math as tm


@triton.jit(
    do_not_specialize=["length"],  # no new compilation for a new length or a new slice
    do_not_specialize_on_alignment=[{quoted}],
)
def {name}({pointers}, length, BLOCK: tl.constexpr):
    offs_t = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask_t = offs_t < length
{loads}
{body}
{stores}
"""


class _Generator:
    """Writes the nodes that the outputs need, and no others, in the graph's order."""

    def __init__(self, graph_module: GraphModule, input_names: Sequence[str], length: int) -> None:
        self.length = length
        self.nodes = list(graph_module.graph.nodes)
        self.names: dict[Node, str] = {}
        self.variables: dict[str, str] = {}  # expression -> the variable that holds it
        self.lines: list[str] = []
        self.input_names = input_names
        self.outputs = self._outputs()

    def generate(self) -> str:
        """Return the module's source.

        Raises:
            UntraceableError: an operation the outputs depend on is not pointwise.
        """
        _refuse_shared_mutation(self.nodes)
        needed = _needed(self.outputs)
        placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.names.update(zip(placeholders, self.input_names, strict=True))
        for node in self.nodes:
            if node in needed and node.op != "placeholder":
                self._check(node)
                self._assign(node, render(node, self._operand))
        outputs = [f"out{index}" for index in range(len(self.outputs))]
        pointers = [f"{name}_ptr" for name in (*self.input_names, *outputs)]
        loads = [f"{x} = tl.load({x}_ptr + offs_t, mask=mask_t)" for x in self.input_names]
        stores = [
            f"tl.store({x}_ptr + offs_t, {self.names[node]}, mask=mask_t)"
            for x, node in zip(outputs, self.outputs, strict=True)
        ]
        return _TEMPLATE.format(
            name=KERNEL_NAME,
            pointers=", ".join(pointers),
            quoted=", ".join(f'"{pointer}"' for pointer in pointers),
            body=_indented(self.lines),
            loads=_indented(loads),
            stores=_indented(stores),
        )

    def _outputs(self) -> list[Node]:
        (results,) = self.nodes[-1].args
        results = results if isinstance(results, tuple | list) else (results,)
        for index, node in enumerate(results):
            value = node.meta.get("val") if isinstance(node, Node) else node
            if not isinstance(value, Tensor) or value.shape != (self.length,):
                shape = tuple(value.shape) if isinstance(value, Tensor) else value
                raise UntraceableError(f"output {index}: expected a (T,) vector, got {shape}")
        return list(results)

    def _assign(self, node: Node, expression: str) -> None:
        """Name the node's value. Copies and repeated expressions get no line of their own."""
        known = self.variables.get(expression)
        if known is None:
            known = f"v{len(self.lines)}"
            self.lines.append(f"{known} = {expression}")
            self.variables[known] = self.variables[expression] = known
        self.names[node] = known

    def _operand(self, value: Any, dtype: torch.dtype) -> str:
        """Return an argument's text: a variable, converted where its dtype differs, or a number."""
        if not isinstance(value, Node):
            return literal(value, dtype)
        name, own = self.names[value], value_of(value).dtype
        if own == dtype:
            return name
        return f"({name} != 0)" if dtype == torch.bool else f"{name}.to({TRITON_DTYPES[dtype]})"

    def _check(self, node: Node) -> None:
        shape = tuple(value_of(node).shape)
        if shape not in ((), (self.length,)):
            raise UntraceableError(f"{node.target}: its result of shape {shape} is not (T,)")


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def _refuse_shared_mutation(nodes: Sequence[Node]) -> None:
    """Raise where an in-place operation changes memory that a view or the caller's input shares. On
    a value's own memory it is fine: the trace hands the changed value to its later readers."""
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            changed = node.args[0] if schema_of(node).is_mutable else None
            if isinstance(changed, Node) and not _is_private(changed):
                raise UntraceableError(f"{node.target}: in place on an input or a shared value")


def _is_private(node: Node) -> bool:
    """Return whether no input and no view shares this value's memory."""
    if node.op != "call_function" or operation_name(node) in VIEWS:
        return False
    users = [user for user in node.users if user.op == "call_function"]
    return not any(operation_name(user) in VIEWS for user in users)


def _needed(outputs: Sequence[Node]) -> set[Node]:
    """Return the nodes whose values reach an output. What only lends its shape (the ``like`` of a
    ``full_like``) is not among them, so the sum in front of a backward pass is never generated."""
    needed: set[Node] = set()
    pending = list(outputs)
    while pending:
        node = pending.pop()
        if node in needed:
            continue
        needed.add(node)
        pending += _value_inputs(node)
    return needed


def _value_inputs(node: Node) -> list[Node]:
    if node.op == "placeholder":
        return []
    name = operation_name(node)
    if name.startswith("new_") or name.endswith("_like"):
        return []
    return node.all_input_nodes[1:] if name == "copy" else node.all_input_nodes


def generate_kernel(graph_module: GraphModule, input_names: Sequence[str], length: int) -> str:
    """Return the Triton source of a kernel for a graph traced on vectors of ``length``."""
    return _Generator(graph_module, input_names, length).generate()
