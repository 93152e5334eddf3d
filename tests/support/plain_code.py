"""Code that is hard to read: arguments without names or hidden in a tuple, and squeezed lines."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable, Iterator
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


_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
_LAYOUT |= {tokenize.ENDMARKER}


def tokens_per_line(sources: Iterable[str]) -> float:
    """Return the tokens of a line of code; imports and docstrings don't count."""
    tokens = lines = 0
    for source in sources:
        skipped = _imports_and_docstrings(ast.parse(source))
        code = [
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type not in _LAYOUT and token.start[0] not in skipped
        ]
        tokens += len(code)
        lines += len(set(code))
    return tokens / lines


def _imports_and_docstrings(tree: ast.Module) -> set[int]:
    """Return the numbers of their lines."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in ast.walk(tree):
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            nodes.append(node.body[0])
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or 0) + 1)}
