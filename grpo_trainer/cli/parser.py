"""TrlParser: dataclasses from a command line over a YAML file over their defaults."""

from __future__ import annotations

import os
import re
import sys
from argparse import Action, ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from grpo_trainer.common import hint, printable

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


def read_run_file(path: str, actions: Mapping[str, Action], hints: Mapping[str, Any]) -> RunFile:
    """Read ``name: value`` lines.

    A plain value is taken as written, so that ``save_strategy: no`` is the word and not a boolean.

    Args:
        path: the file.
        actions: the arguments there are, by name.
        hints: their types, by name.

    Raises:
        ValueError: there is no such file, it is not YAML, has an argument more than once, or a
            value of the wrong kind. The message names the file.
    """
    read = RunFile(path=path)
    for name, node in _entries(Path(path)):
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        plain = all(isinstance(item, yaml.ScalarNode) for item in items)
        if name == "env" and name not in actions:
            read.environment.update(_environment(path, node))
            continue
        if name not in actions:
            read.unknown[name] = [str(item.value) for item in items]
            continue
        try:
            value = _Loader("").construct_document(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of another language, an odd date
            raise ValueError(f"--config: {path}: {name} cannot be read: {error}") from error
        if isinstance(node, yaml.ScalarNode) and value is not None:
            read.words.append(f"--{name}={node.value}")  # one word: it may begin with a dash
        elif plain and items and node not in items and actions[name].nargs == "+":
            read.words.extend((f"--{name}", *(item.value for item in items)))
        elif _is_allowed(value, actions[name], hints[name]):
            read.values[name] = value
        else:
            kind = type(value).__name__ if value is not None else "null"
            raise ValueError(f"--config: {path}: {name} cannot be a {kind}: {value!r}")
    return read


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
    names = [key.value for key, _ in entries]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"--config: {path} has {name} more than once")
    return [(key.value, node) for key, node in entries]


def _check_size(root: yaml.Node | None) -> None:
    """Raise YAMLError if there is more in a file, with what aliases repeat, than anybody writes."""
    left, seen = [root], 0
    while left:
        node = left.pop()
        seen += 1
        if isinstance(node, yaml.CollectionNode):
            for item in node.value:
                left += item if isinstance(item, tuple) else [item]
        if seen + len(left) > _MOST_VALUES:
            raise yaml.YAMLError(f"expected at most {_MOST_VALUES:,} values, aliases included")


def _environment(path: str, node: yaml.Node) -> dict[str, str]:
    pairs: list[Any] = node.value if isinstance(node, yaml.MappingNode) else [(None, None)]
    if not all(isinstance(item, yaml.ScalarNode) for pair in pairs for item in pair):
        raise ValueError(f"--config: {path}: expected `NAME: value` lines in env")
    return {key.value: value.value for key, value in pairs}


def _is_allowed(value: Any, action: Action, hint: Any) -> bool:
    if value is None:
        return type(None) in get_args(hint)
    if isinstance(value, dict):
        return re.search(r"\bdict\b", str(hint)) is not None
    # a list of several words has been read by now, unless it is empty or nested
    if action.nargs != "+" or not value:
        return "list" in str(hint)
    described = [is_dataclass(kind) for kind in get_args(hint)]
    return any(described) and all(isinstance(item, dict) for item in value)


class TrlParser(HfArgumentParser):
    """Reads dataclasses from the command line and from the YAML file that ``--config`` names.

    A flag without a value is true. Errors of the command line are one line on stderr, and the exit
    code is 2.

    Raises:
        ValueError: a dataclass has a field ``config``.
    """

    _source = ""  # where the words come from, for messages

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        types = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types or ()
        for kind in (types := list(types)):
            if "config" in kind.__dataclass_fields__:  # type: ignore[attr-defined]
                raise ValueError(
                    f"dataclass_types: expected no field `config`, which names the file, got one "
                    f"in {kind.__name__}"
                )
        super().__init__(types, **{"allow_abbrev": False} | kwargs)
        for action in self._actions:
            if action.type is string_to_bool and action.nargs is None:
                action.nargs, action.const = "?", True
        self.add_argument("--config", help="YAML file with arguments; the command line overrides.")

    def parse_args_and_config(
        self,
        args: Iterable[str] | None = None,
        return_remaining_strings: bool = False,
        fail_with_unknown_args: bool = True,
        separate_remaining_strings: bool = False,
    ) -> tuple[Any, ...]:
        """Return an instance of each dataclass.

        Environment variables under ``env`` in the file are set first.

        Args:
            args: the words; by default those of the process.
            return_remaining_strings: return those that nobody knows at the end, as one list.
            fail_with_unknown_args: refuse unknown names in the file, too.
            separate_remaining_strings: return two lists, of the file and of the command line.

        Raises:
            ValueError: the file is wrong, an argument is unknown, or a value is out of range.
        """
        file, words = self.read(args)
        words = [*file.words, *words]
        rest = self.parse_known_args(words)[1]
        if not return_remaining_strings:
            self._check_known(rest, file, fail_with_unknown_args)
        *found, _, _ = self.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        if not return_remaining_strings:
            return tuple(found)
        of_file = [word for name, item in file.unknown.items() for word in (f"--{name}", *item)]
        lists = [of_file, rest] if separate_remaining_strings else [of_file + rest]
        return (*found, *lists)

    def read(self, args: Iterable[str] | None = None) -> tuple[RunFile, list[str]]:
        """Return what the file says, and the words of the command line without the file.

        What has no words in the file becomes a default; a wrong value in it is an error here.
        """
        first = ArgumentParser(prog=self.prog, add_help=False, allow_abbrev=False)
        first.error = self.error  # type: ignore[method-assign]
        first.add_argument("--config")
        named, words = first.parse_known_args(sys.argv[1:] if args is None else list(args))
        if named.config is None:
            return RunFile(), words
        others = ("help", "config")
        actions = {action.dest: action for action in self._actions if action.dest not in others}
        hints: dict[str, Any] = {}
        for kind in self.dataclass_types:
            hints |= get_type_hints(kind)
        file = read_run_file(named.config, actions, hints)
        os.environ.update(file.environment)
        self.set_defaults(**file.values)
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False  # the command line may have it
        self._source = f"--config: {file.path}: "
        self.parse_known_args(file.words)
        self._source = ""
        for action in required:
            action.required = action.dest not in file.values
        return file, words

    def _check_known(self, rest: Sequence[str], file: RunFile, whole_file: bool) -> None:
        known = [action.dest for action in self._actions]
        for name in file.unknown if whole_file else ():
            raise ValueError(
                f"--config: {file.path} has an unknown argument: {name}{hint(name, known)}"
            )
        for word in rest[:1]:
            option = word.partition("=")[0]
            if not option.startswith("--"):
                raise ValueError(f"expected --name value, got {word!r}")
            meant = hint(option.removeprefix("--").replace("-", "_"), known)
            raise ValueError(f"{option}: there is no such argument{meant}")

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr, and exit with code 2."""
        line = " ".join(f"{self._source}{message}".split())
        print(f"{self.prog}: error: {printable(line)}", file=sys.stderr)
        raise SystemExit(2)
