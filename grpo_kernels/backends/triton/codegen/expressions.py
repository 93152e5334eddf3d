"""Triton expressions for aten operations on (T,) vectors."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


class UntraceableError(NotImplementedError):
    """The function does something that a pointwise kernel cannot; the message names it."""


TRITON_DTYPES: dict[torch.dtype, str] = {
    torch.float32: "tl.float32",
    torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}

_NAN = "propagate_nan=tl.PropagateNan.ALL"

# Names in braces are from the aten schema; the operands have the result's dtype.
_ARITHMETIC: dict[str, str] = {
    "abs": "tl.abs({self})",
    "add": "{self} + {other}",
    "div": "tl.div_rn({self}, {other})",
    "exp": "tm.precise_exp({self})",
    "expm1": "tl.where(tl.abs({self}) < 1.0, tm.expm1({self}), tm.precise_exp({self}) - 1.0)",
    "log": "tl.log({self})",
    "log1p": "tm.log1p({self})",
    "maximum": f"tl.maximum({{self}}, {{other}}, {_NAN})",
    "minimum": f"tl.minimum({{self}}, {{other}}, {_NAN})",
    "mul": "{self} * {other}",
    "neg": "-{self}",
    "reciprocal": "tl.div_rn(1.0, {self})",
    "relu": f"tl.maximum({{self}}, 0.0, {_NAN})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({self}))",
    "sigmoid": "tl.div_rn(1.0, 1.0 + tm.precise_exp(-{self}))",
    "sign": "tl.where({self} > 0, 1.0, tl.where({self} < 0, -1.0, 0.0))",
    "sqrt": "tl.sqrt_rn({self})",
    "sub": "{self} - {other}",
    "tanh": "tm.tanh({self})",
}
# the operands are promoted to a common dtype, the result is bool
_COMPARISONS: dict[str, str] = {
    "eq": "{self} == {other}",
    "ge": "{self} >= {other}",
    "gt": "{self} > {other}",
    "isinf": 'tl.abs({self}) == float("inf")',
    "isnan": "{self} != {self}",
    "le": "{self} <= {other}",
    "lt": "{self} < {other}",
    "ne": "{self} != {other}",
}
# logical and bitwise operations; operands are converted to bool
_LOGICAL: dict[str, str] = {
    "and": "{self} & {other}",
    "mul": "{self} & {other}",
    "not": "{self} == 0",
    "or": "{self} | {other}",
    "xor": "{self} != {other}",
}
# results of these share memory with an operand
VIEWS = frozenset(["_unsafe_view", "alias", "detach", "expand", "view"])
# return an operand, converted to the result's dtype
_COPIES = VIEWS | {"_to_copy", "clone", "copy", "lift_fresh_copy"}
# filled with a number; also as ``new_ones`` or ``ones_like``
_FILLS = ("full", "ones", "scalar_tensor", "zeros")
# arguments that do not affect values; any other unknown argument is an error if it is set
_HARMLESS = frozenset(
    ["device", "dtype", "implicit", "layout", "memory_format", "non_blocking", "pin_memory", "size"]
)
_MAX_POWER = 8

Operand = Callable[[Any, torch.dtype], str]  # a node or number and its dtype -> Triton text


def operation_name(node: Node) -> str:
    """Return the aten name without overload and without the underscore of the in-place form."""
    if node.op == "get_attr":
        raise UntraceableError(
            f"{node.target}: a tensor made or closed over by the function; expected Python numbers"
        )
    return schema_of(node).name.split("::")[1].rstrip("_")


def schema_of(node: Node) -> torch.FunctionSchema:
    """Return the aten schema of a node; raise UntraceableError if it is not an aten operation."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise UntraceableError(f"{node.op} {node.target}: not an operation on the inputs")
    return node.target._schema


def render(node: Node, operand: Operand) -> str:
    """Return the Triton expression of an aten node; raise UntraceableError if there is none."""
    name = operation_name(node)
    dtype = node.meta["val"].dtype
    names = [argument.name for argument in schema_of(node).arguments]
    bound = dict(zip(names, node.args, strict=False)) | node.kwargs
    arguments = {k: v for k, v in bound.items() if v is not None}
    if name.removeprefix("new_").removesuffix("_like") in _FILLS:
        return _full(arguments.get("fill_value", arguments.get("s", int("ones" in name))), dtype)
    template, operand_dtype = _template(node, name, arguments)
    read = {field for _, field, _, _ in string.Formatter().parse(template) if field}
    for unknown in arguments.keys() - read - _HARMLESS - {"self", "exponent"}:
        value = arguments[unknown]
        if unknown != "alpha" or value != 1:
            raise UntraceableError(f"{node.target}: argument {unknown}={value!r} has no rendering")
    dtypes = dict.fromkeys(read, operand_dtype) | {"condition": torch.bool}
    return template.format(**{key: operand(arguments[key], dtypes[key]) for key in read})


def literal(value: Any, dtype: torch.dtype) -> str:
    """Return a Python number as Triton reads it in an expression of ``dtype``."""
    if not isinstance(value, int | float):
        raise UntraceableError(f"constant {value!r}: expected a Python number")
    if dtype == torch.bool:
        return str(bool(value))
    if dtype != torch.float32:
        return f"({int(value)})" if value < 0 else str(int(value))
    number = torch.tensor(value, dtype=torch.float64).to(torch.float32).item()
    if math.isnan(number) or math.isinf(number):
        return f'float("{number}")'
    if abs(number) < torch.finfo(torch.float32).tiny:
        return "0.0"  # Triton would make a subnormal an fp64 constant
    text = repr(float(value))
    return f"({text})" if value < 0 else text


def value_of(node: Node) -> Tensor:
    """Return the traced (fake) result of a node; it must be a tensor of a known dtype."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in TRITON_DTYPES:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        known = ", ".join(str(dtype) for dtype in TRITON_DTYPES)
        raise UntraceableError(f"{node.target}: expected a vector of {known}, got {kind}")
    return value


def _full(value: Any, dtype: torch.dtype) -> str:
    return f"tl.full((BLOCK,), {literal(value, dtype)}, {TRITON_DTYPES[dtype]})"


def _template(node: Node, name: str, arguments: Mapping[str, Any]) -> tuple[str, torch.dtype]:
    """Return an operation's text, and the dtype of its operands."""
    dtype = node.meta["val"].dtype
    if name in _COPIES:
        return ("{src}" if name == "copy" else "{self}"), dtype
    if name == "where":
        return "tl.where({condition}, {self}, {other})", dtype
    if name in ("clamp", "clamp_min", "clamp_max"):
        text = f"tl.maximum({{self}}, {{min}}, {_NAN})" if "min" in arguments else "{self}"
        return (f"tl.minimum({text}, {{max}}, {_NAN})" if "max" in arguments else text), dtype
    if name == "pow":
        return _power(node, arguments["exponent"], dtype), dtype
    if name in _COMPARISONS:
        operands = [x.meta["val"] if isinstance(x, Node) else x for x in arguments.values()]
        return _COMPARISONS[name], torch.result_type(operands[0], operands[-1])
    logical = name.removeprefix("logical_").removeprefix("bitwise_")
    if logical in _LOGICAL and dtype == torch.bool:
        return _LOGICAL[logical], torch.bool
    if name in _ARITHMETIC and dtype != torch.bool:
        return _ARITHMETIC[name], dtype
    raise UntraceableError(f"{node.target}: no pointwise rendering for a {dtype} result")


def _power(node: Node, exponent: Any, dtype: torch.dtype) -> str:
    """Return the text of a power with this exponent."""
    if exponent == 0.5:
        return _ARITHMETIC["sqrt"]
    whole = isinstance(exponent, int | float) and exponent == int(exponent)
    if not whole or abs(exponent) > _MAX_POWER:
        raise UntraceableError(
            f"{node.target}: exponent {exponent}; expected 0.5 or a whole number up to {_MAX_POWER}"
        )
    if exponent == 0:  # 1 even for NaN
        return _full(1, dtype)
    power = " * ".join(["{self}"] * abs(int(exponent)))
    return power if exponent >= 0 else f"tl.div_rn(1.0, {power})"
