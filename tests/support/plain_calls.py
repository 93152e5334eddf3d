"""Calls that are hard to check: many arguments without names, or hidden in a tuple."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def names_of_functions(trees: dict[Path, ast.Module]) -> set[str]:
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {
        node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, kinds)
    }


def unnamed(tree: ast.Module, functions: set[str], most: int = 4) -> Iterator[str]:
    """Yield the calls of our own functions with more than ``most`` positional arguments."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", None))
        count = sum(not isinstance(argument, ast.Starred) for argument in node.args)
        if name in functions and count > most:
            yield f"line {node.lineno}: {name} gets {count} arguments without a name"


def starred(tree: ast.Module) -> Iterator[str]:
    """Yield the tuples that a function makes and stars in a call."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        tuples = {name for node in ast.walk(function) for name in _tuples(node)}
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        values = [x.value for call in calls for x in call.args if isinstance(x, ast.Starred)]
        for value in values:
            if isinstance(value, ast.Name) and value.id in tuples:
                yield f"line {value.lineno}: *{value.id}"


def _tuples(node: ast.AST) -> Iterator[str]:
    """Yield the names to which an assignment gives a tuple that is written out."""
    if not isinstance(node, ast.Assign):
        return
    target, value = node.targets[0], node.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = list(zip(target.elts, value.elts, strict=False))
    for name, each in pairs:
        if isinstance(name, ast.Name) and isinstance(each, ast.Tuple):
            yield name.id
