"""Triton expressions for aten operations on (T,) vectors."""

from __future__ import annotations

import math
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

# Names in braces are those of the aten schema; the operands have the result's dtype.
ARITHMETIC: dict[str, str] = {
    "abs": "tl.abs({self})",
    "add": "{self} + {other}",
    "div": "tl.div_rn({self}, {other})",
    "exp": "tm.precise_exp({self})",
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
COMPARISONS: dict[str, str] = {
    "eq": "{self} == {other}",
    "ge": "{self} >= {other}",
    "gt": "{self} > {other}",
    "isinf": 'tl.abs({self}) == float("inf")',
    "isnan": "{self} != {self}",
    "le": "{self} <= {other}",
    "lt": "{self} < {other}",
    "ne": "{self} != {other}",
}
# the operands are converted to bool; the bitwise ones take nothing else here
LOGICAL: dict[str, str] = {
    "bitwise_and": "{self} & {other}",
    "bitwise_not": "{self} == 0",
    "bitwise_or": "{self} | {other}",
    "logical_and": "{self} & {other}",
    "logical_not": "{self} == 0",
    "logical_or": "{self} | {other}",
    "logical_xor": "{self} != {other}",
    "mul": "{self} & {other}",
}
# one operand passed on, with the dtype that the result has
COPIES: dict[str, str] = {
    "_to_copy": "self",
    "_unsafe_view": "self",
    "alias": "self",
    "clone": "self",
    "copy": "src",
    "detach": "self",
    "expand": "self",
    "lift_fresh_copy": "self",
    "view": "self",
}
FILLS: dict[str, str | float] = {
    "full": "fill_value",
    "full_like": "fill_value",
    "new_full": "fill_value",
    "new_ones": 1,
    "new_zeros": 0,
    "ones": 1,
    "ones_like": 1,
    "scalar_tensor": "s",
    "zeros": 0,
    "zeros_like": 0,
}
# results of these share memory with an operand
VIEWS = frozenset({"_unsafe_view", "alias", "detach", "expand", "view"})
# arguments that say nothing about the values; any other unknown one is refused when it is set
_HARMLESS = frozenset(
    {"device", "dtype", "implicit", "layout", "memory_format", "non_blocking", "pin_memory", "size"}
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
    """Return the aten schema of a node; refuses what is no aten operation."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        raise UntraceableError(f"{node.op} {node.target}: not an operation on the inputs")
    return node.target._schema


def arguments(node: Node) -> dict[str, Any]:
    """Return the node's arguments that are set, by their schema names."""
    names = [argument.name for argument in schema_of(node).arguments]
    bound = dict(zip(names, node.args, strict=False))
    return {k: v for k, v in {**bound, **node.kwargs}.items() if v is not None}


def render(node: Node, operand: Operand) -> str:
    """Return the Triton expression of one aten node.

    Raises:
        UntraceableError: the operation, or one of its arguments, has no rendering.
    """
    name, given, dtype = operation_name(node), arguments(node), node.meta["val"].dtype
    if name in FILLS:
        fill = FILLS[name]
        value = given[fill] if isinstance(fill, str) else fill
        return f"tl.full((BLOCK,), {literal(value, dtype)}, {TRITON_DTYPES[dtype]})"
    if name in COPIES:
        _expect(node, given, {"self", COPIES[name]})
        return operand(given[COPIES[name]], dtype)
    if name == "where":
        _expect(node, given, {"condition", "self", "other"})
        choices = f"{operand(given['self'], dtype)}, {operand(given['other'], dtype)}"
        return f"tl.where({operand(given['condition'], torch.bool)}, {choices})"
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamp(node, given, operand, dtype)
    if name == "pow":
        return _power(node, given, operand, dtype)
    template, operand_dtype = _template(node, name, given)
    _expect(node, given, {"self", "other"})
    return template.format(**{key: operand(given[key], operand_dtype) for key in given})


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
        return "0.0"  # Triton would take a subnormal for fp64
    text = repr(float(value))
    return f"({text})" if value < 0 else text


def _template(node: Node, name: str, given: Mapping[str, Any]) -> tuple[str, torch.dtype]:
    """Return the text and dtype of the operands."""
    dtype = node.meta["val"].dtype
    if name in COMPARISONS:
        return COMPARISONS[name], _promoted(given.values())
    if name in LOGICAL and dtype == torch.bool:
        return LOGICAL[name], torch.bool
    if name in ARITHMETIC and dtype != torch.bool:
        return ARITHMETIC[name], dtype
    raise UntraceableError(f"{node.target}: no pointwise rendering for a {dtype} result")


def _promoted(values: Any) -> torch.dtype:
    """Apply torch's type promotion to vectors of these dtypes and Python numbers."""
    dtype = torch.bool
    for value in values:
        if isinstance(value, Node):
            dtype = torch.promote_types(dtype, value.meta["val"].dtype)
        elif isinstance(value, float):
            dtype = torch.promote_types(dtype, torch.float32)
        elif not isinstance(value, bool) and dtype == torch.bool:
            dtype = torch.int64
    return dtype


def _clamp(node: Node, given: Mapping[str, Any], operand: Operand, dtype: torch.dtype) -> str:
    _expect(node, given, {"self", "min", "max"})
    text = operand(given["self"], dtype)
    if "min" in given:
        text = f"tl.maximum({text}, {operand(given['min'], dtype)}, {_NAN})"
    if "max" in given:
        text = f"tl.minimum({text}, {operand(given['max'], dtype)}, {_NAN})"
    return text


def _power(node: Node, given: Mapping[str, Any], operand: Operand, dtype: torch.dtype) -> str:
    _expect(node, given, {"self", "exponent"})
    base, exponent = operand(given["self"], dtype), given["exponent"]
    if exponent == 0.5:
        return ARITHMETIC["sqrt"].format(self=base)
    whole = isinstance(exponent, int | float) and exponent == int(exponent)
    if not whole or abs(exponent) > _MAX_POWER:
        raise UntraceableError(
            f"{node.target}: exponent {exponent}; expected 0.5 or a whole number up to {_MAX_POWER}"
        )
    if exponent == 0:  # 1 even for NaN
        return f"tl.full((BLOCK,), {literal(1, dtype)}, {TRITON_DTYPES[dtype]})"
    power = " * ".join([base] * abs(int(exponent)))
    return power if exponent >= 0 else f"tl.div_rn(1.0, {power})"


def _expect(node: Node, given: Mapping[str, Any], known: set[str]) -> None:
    """Refuse set arguments that the rendering would ignore."""
    for name in given.keys() - known - _HARMLESS:
        value = given[name]
        if name == "alpha" and value == 1:
            continue
        raise UntraceableError(f"{node.target}: argument {name}={value!r} has no rendering")


def value_of(node: Node) -> Tensor:
    """Return the traced (fake) result of a node; refuses what is not a tensor of a known dtype."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dtype not in TRITON_DTYPES:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        known = ", ".join(str(dtype) for dtype in TRITON_DTYPES)
        raise UntraceableError(f"{node.target}: gives {kind}; expected a vector of {known}")
    return value
