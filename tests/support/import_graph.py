"""The import graph of the project, by module and by room.

``python -m tests.support.import_graph`` draws it.

A room is a folder directly below a package, with all that lies in it, or a file beside the folders.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("grpo_kernels", "grpo_trainer", "tests", "benchmarks")

Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One import of a module of the project, wherever it stands in the file."""

    by: str  # module
    module: str  # that is named, "a.b" in "from a.b import c"
    name: str | None  # "c"
    line: int

    @property
    def target(self) -> str:
        """The module that is imported: ``module``, or what it has of that name below it."""
        deeper = f"{self.module}.{self.name}"
        return deeper if deeper in modules() else self.module


@cache
def modules() -> dict[str, Path]:
    """Map every module's name to its file."""
    return {
        _name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    }


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """Return the room of a module: "package.room"."""
    return ".".join(module.split(".")[:2])


@cache
def imports(module: str) -> tuple[Import, ...]:
    """Return the imports in one module, those under ``TYPE_CHECKING`` and in functions included."""
    tree = ast.parse(modules()[module].read_text())
    return tuple(found for node in ast.walk(tree) for found in _imports(node, module))


def _imports(node: ast.AST, module: str) -> Iterator[Import]:
    named: list[tuple[str, str | None]]
    if isinstance(node, ast.Import):
        named = [(alias.name, None) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        named = [(node.module or "", alias.name) for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        named = [(x.value, None) for x in node.args if isinstance(x, ast.Constant)]
    else:
        assert not isinstance(node, ast.ImportFrom), f"{module}: imports are absolute"
        return
    for name, item in named:
        if name.split(".")[0] in PACKAGES:
            yield Import(module, name, item, node.lineno)


def module_graph(package: str) -> dict[str, set[str]]:
    """Return which modules of a package each of them imports."""
    own = [name for name in modules() if name.split(".")[0] == package]
    return {
        name: {found.target for found in imports(name) if found.target in own} - {name}
        for name in own
    }


def room_graph(package: str) -> dict[str, set[str]]:
    """Return which rooms of a package each of them imports."""
    rooms: dict[str, set[str]] = {}
    for name, targets in module_graph(package).items():
        rooms.setdefault(room(name), set()).update(room(target) for target in targets)
    return {name: targets - {name, package} for name, targets in rooms.items() if name != package}


def floors(graph: Graph) -> int:
    """Return the number of nodes on the longest path of a graph without circles."""

    @cache
    def height(node: str) -> int:
        return 1 + max(map(height, graph[node]), default=0)

    return max(map(height, graph))


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of nodes that reach each other."""
    reached = {node: _reach(graph, node) for node in graph}
    found = {
        tuple(sorted({node} | {other for other in reached[node] if node in reached[other]}))
        for node in graph
    }
    return [list(group) for group in sorted(found) if len(group) > 1]


def _reach(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        for node in graph.get(ahead.pop(), ()):
            if node not in seen:
                seen.add(node)
                ahead.append(node)
    return seen


def main() -> None:
    for package in PACKAGES[:2]:
        graph, rooms = module_graph(package), room_graph(package)
        lines = sum(len(modules()[name].read_text().splitlines()) for name in graph)
        arrows = sum(map(len, rooms.values()))
        print(f"// {package}: {len(graph)} files, {lines} lines, {len(rooms)} rooms,", end=" ")
        print(f"{floors(rooms)} floors, {arrows} arrows, {len(circles(graph))} circles of files")
        print(f"digraph {package} {{")
        for name, below in sorted(rooms.items()):
            print(f'  "{name}" -> {{{" ".join(f"{chr(34)}{b}{chr(34)}" for b in sorted(below))}}};')
        print("}")


if __name__ == "__main__":
    main()
