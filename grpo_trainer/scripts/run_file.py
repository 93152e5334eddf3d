"""A run's YAML file: it says what the command line says, and is read by the same parser."""

from __future__ import annotations

import re
from argparse import Action
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, get_args

import yaml

_MOST_VALUES = 100_000  # aliases of aliases grow exponentially in all that is made of them


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-6 as text; numbers are what Python says they are."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """What a file sets."""

    path: str = ""
    words: list[str] = field(default_factory=list)  # as on the command line
    values: dict[str, Any] = field(default_factory=dict)  # mappings, and what else has no words
    environment: dict[str, str] = field(default_factory=dict)  # variables to set
    unknown: dict[str, list[str]] = field(default_factory=dict)  # words of each unknown argument


def read_run_file(
    path: Path, actions: Mapping[str, Action], hints: Mapping[str, Any], mappings: Collection[str]
) -> RunFile:
    """Read ``name: value`` lines.

    A plain value is taken as written, so that ``save_strategy: no`` is the word and not a boolean.

    Args:
        path: the file.
        actions: the arguments there are, by name.
        hints: their types, by name.
        mappings: the names of those that may be mappings.

    Raises:
        ValueError: there is no such file, it is not YAML, has an argument more than once, or a
            value of the wrong kind. The message names the file.
    """
    read, seen = RunFile(path=str(path)), set[str]()
    for name, node in _entries(path):
        if name == "env" and name not in actions:
            read.environment.update(_environment(path, node))
            continue
        if name not in actions:
            read.unknown[name] = _words(node)
            continue
        if name in seen:
            raise ValueError(f"--config: {path} has {name} more than once")
        seen.add(name)
        try:
            value = _value(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of another language, an odd date
            raise ValueError(f"--config: {path}: {name} cannot be read: {error}") from error
        if isinstance(node, yaml.ScalarNode) and value is not None:
            read.words.append(f"--{name}={node.value}")  # one word: it may begin with a dash
        elif _has_words(node, actions[name]):
            read.words.extend((f"--{name}", *(item.value for item in node.value)))
        elif _is_allowed(value, actions[name], hints[name], name in mappings):
            read.values[name] = value
        else:
            kind = type(value).__name__ if value is not None else "null"
            raise ValueError(f"--config: {path}: {name} cannot be a {kind}: {value!r}")
    return read


def _environment(path: Path, node: yaml.Node) -> dict[str, str]:
    pairs: list[Any] = node.value if isinstance(node, yaml.MappingNode) else [(None, None)]
    if not all(isinstance(item, yaml.ScalarNode) for pair in pairs for item in pair):
        raise ValueError(f"--config: {path}: expected `NAME: value` lines in env")
    return {key.value: value.value for key, value in pairs}


def _words(node: yaml.Node) -> list[str]:
    items = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return [str(item.value) for item in items]


def _entries(path: Path) -> list[tuple[str, yaml.Node]]:
    if not path.is_file():
        raise ValueError(f"--config: no such file {str(path)!r}")
    try:
        root = yaml.compose(path.read_text(), Loader=_Loader)
        _check_size(root)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"--config: {path} is nested too deep") from error
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    if not entries or not all(isinstance(key, yaml.ScalarNode) for key, _ in entries):
        raise ValueError(f"--config: expected `name: value` lines in {path}")
    return [(key.value, node) for key, node in entries]


def _check_size(root: yaml.Node | None) -> None:
    """Raise YAMLError if there is more in a file, with what aliases repeat, than anybody writes."""
    left, seen = [root], 0
    while left:
        node = left.pop()
        seen += 1
        if isinstance(node, yaml.SequenceNode):
            left += node.value
        elif isinstance(node, yaml.MappingNode):
            left += [item for pair in node.value for item in pair]
        if seen + len(left) > _MOST_VALUES:
            raise yaml.YAMLError(f"expected at most {_MOST_VALUES:,} values, aliases included")


def _value(node: yaml.Node) -> Any:
    return _Loader("").construct_document(node)


def _has_words(node: yaml.Node, action: Action) -> bool:
    """Return whether it is a list that the command line takes as several words."""
    if not isinstance(node, yaml.SequenceNode) or action.nargs != "+" or not node.value:
        return False
    return all(isinstance(item, yaml.ScalarNode) for item in node.value)


def _is_allowed(value: Any, action: Action, hint: Any, may_be_mapping: bool) -> bool:
    if value is None:
        return type(None) in get_args(hint)
    if isinstance(value, dict):
        return may_be_mapping
    # a list of several words has been read by now, unless it is empty or nested
    if action.nargs != "+" or not value:
        return "list" in str(hint)
    described = [is_dataclass(kind) for kind in get_args(hint)]
    return any(described) and all(isinstance(item, dict) for item in value)
