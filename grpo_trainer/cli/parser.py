"""Dataclasses from a command line over a YAML file over their defaults, and of the launcher."""

from __future__ import annotations

import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

import yaml
from accelerate.commands.launch import launch_command_parser
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from grpo_kernels.tools import OneLineParser
from grpo_trainer.common import hint, printable

Words = dict[str, list[str]]  # of arguments, by name

_FOLDER = Path(__file__).parents[1] / "accelerate_configs"
_NAME = "accelerate_config"  # a file for `accelerate launch`, or the name of one of ours
_METAVARS = {string_to_bool: "BOOL", int: "INT", float: "FLOAT"}
_LAUNCHED = "GRPO_TRAIN_LAUNCHED"  # is set for the processes that are started
_OTHERS = ("RANK", "ACCELERATE_MIXED_PRECISION")  # are set by torchrun and accelerate


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-6 as text; numbers are what Python says they are."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _nodes(path: str) -> dict[str, yaml.Node]:
    """Return the values of the ``name: value`` lines of a file."""
    if not Path(path).is_file():
        raise ValueError(f"--config: no such file {path!r}")
    try:
        root = yaml.compose(Path(path).read_text(), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config: {path} is not YAML: {error}") from error
    except RecursionError as error:
        raise ValueError(f"--config: {path} is nested too deep") from error
    entries = root.value if isinstance(root, yaml.MappingNode) else []
    if not entries or not all(isinstance(key, yaml.ScalarNode) for key, _ in entries):
        raise ValueError(f"--config: expected `name: value` lines in {path}")
    nodes: dict[str, yaml.Node] = {}
    for key, node in entries:
        if key.value in nodes:
            raise ValueError(f"--config: {path} has {key.value} more than once")
        nodes[key.value] = node
    return nodes


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
    # a list of several words has been read by now, unless it is empty
    return (action.nargs != "+" or not value) and "list" in str(hint)


class TrlParser(HfArgumentParser):
    """Reads dataclasses from the command line and from the YAML file that ``--config`` names.

    A flag without a value is true, and ``--no_NAME`` makes it false. Errors of the command line
    are one line on stderr, and the exit code is 2.

    Raises:
        ValueError: a dataclass has a field ``config``.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **{"allow_abbrev": False} | kwargs)
        for kind in self.dataclass_types:
            if "config" in kind.__dataclass_fields__:
                raise ValueError(
                    f"dataclass_types: expected no field `config`, which names the file, got one "
                    f"in {kind.__name__}"
                )
        known = self._option_string_actions
        for action in self._actions[:]:
            if action.metavar is None and action.choices is None and action.nargs != 0:
                action.metavar = _METAVARS.get(action.type, "TEXT")
            if action.type is string_to_bool:
                action.nargs, action.const = "?", True
                if (opposite := f"--no_{action.dest}") in known:
                    known[opposite].help = SUPPRESS
                else:
                    self.add_argument(
                        opposite,
                        opposite.replace("_", "-"),
                        action="store_false",
                        dest=action.dest,
                        default=SUPPRESS,
                        help=SUPPRESS,
                    )
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
        path, unknown, words = self.read(args)
        rest = self.parse_known_args(words)[1]
        if not return_remaining_strings:
            self._check_known(path, unknown if fail_with_unknown_args else {}, rest)
        *found, _, _ = self.parse_args_into_dataclasses(
            words, return_remaining_strings=True, look_for_args_file=False
        )
        if not return_remaining_strings:
            return tuple(found)
        of_file = [word for name, item in unknown.items() for word in (f"--{name}", *item)]
        lists = [of_file, rest] if separate_remaining_strings else [of_file + rest]
        return (*found, *lists)

    def read(self, args: Iterable[str] | None = None) -> tuple[str, Words, list[str]]:
        """Return the file's path and the words of what is unknown in it, and the command line's.

        What the file sets becomes a default. A plain value is taken as written, so that
        ``save_strategy: no`` is the word and not a boolean.
        """
        first = OneLineParser(prog=self.prog, add_help=False)
        first.add_argument("--config")
        known, words = first.parse_known_args(None if args is None else list(args))
        if (path := known.config) is None:
            return "", {}, words
        hints = {k: v for kind in self.dataclass_types for k, v in get_type_hints(kind).items()}
        # a flag's own action stands before that of its --no_NAME
        actions = {item.dest: item for item in reversed(self._actions) if item.dest in hints}
        unknown: Words = {}
        for name, node in _nodes(path).items():
            if name in actions:
                self.set_defaults(**{name: self._value(path, node, actions[name], hints[name])})
                actions[name].required = False
            elif name == "env":
                os.environ.update(_environment(path, node))
            else:
                items = node.value if isinstance(node, yaml.SequenceNode) else [node]
                unknown[name] = [str(item.value) for item in items]
        return path, unknown, words

    def _check_known(self, path: str, unknown: Words, rest: list[str]) -> None:
        """Raise ValueError if there are unknown names in a file, or words on the command line."""
        known = [action.dest for action in self._actions]
        for name in unknown:
            raise ValueError(f"--config: {path} has an unknown argument: {name}{hint(name, known)}")
        for word in rest[:1]:
            if not word.startswith("--"):
                raise ValueError(f"expected --name value, got {word!r}")
            option = word.partition("=")[0]
            meant = hint(option.removeprefix("--").replace("-", "_"), known)
            raise ValueError(f"{option}: there is no such argument{meant}")

    def _value(self, path: str, node: yaml.Node, action: Action, hint: Any) -> Any:
        try:
            value = _Loader("").construct_document(node)
        except (yaml.YAMLError, ValueError) as error:  # a tag of another language, an odd date
            raise ValueError(f"--config: {path}: {action.dest} cannot be read: {error}") from error
        is_list = isinstance(node, yaml.SequenceNode) and action.nargs == "+"
        items = node.value if is_list else [node] if value is not None else []
        if items and all(isinstance(item, yaml.ScalarNode) for item in items):
            try:
                return self._get_values(action, [item.value for item in items])
            except ArgumentError as error:
                self.error(f"--config: {path}: {error}")
        if not _is_allowed(value, action, hint):
            kind = type(value).__name__ if value is not None else "null"
            raise ValueError(f"--config: {path}: {action.dest} cannot be a {kind}: {value!r}")
        return value

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr, and exit with code 2."""
        line = printable(" ".join(message.split()))
        ArgumentParser.exit(self, 2, f"{self.prog}: error: {line}\n")


class LaunchParser(TrlParser):
    """Takes out what belongs to ``accelerate launch``, in the file and on the command line."""

    launch: list[str]  # words for it

    def read(self, args: Iterable[str] | None = None) -> tuple[str, Words, list[str]]:
        path, unknown, words = super().read(args)
        flags = launch_command_parser()._option_string_actions
        names = {_NAME} | {flag.removeprefix("--") for flag in flags if re.match(r"--\w+$", flag)}
        names -= {action.dest for action in self._actions}
        launcher = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in names:
            launcher.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="*")
        on_line, words = launcher.parse_known_args(words)
        in_file = {name: item for name, item in unknown.items() if name in names}
        self.launch = []
        for name, item in (in_file | vars(on_line)).items():  # the command line overrides the file
            if name == _NAME:
                self.launch += ["--config_file", _file(*item[:1])]
            elif flags[f"--{name}"].nargs != 0:
                self.launch += [f"--{name}", *item]
            elif all(map(string_to_bool, item)):  # a flag, which a file gives a value
                self.launch += [f"--{name}"]
        others = {name: item for name, item in unknown.items() if name not in names}
        return path, others, words

    def start_if_asked(self, args: Iterable[str]) -> None:
        """Become ``accelerate launch`` of the same run, if there is something for it."""
        path, unknown, words = self.read(args)
        if not self.launch or any(name in os.environ for name in (_LAUNCHED, *_OTHERS)):
            return
        self._check_known(path, unknown, self.parse_known_args(words)[1])
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        config = ["--config", path] if path else []
        command += [*self.launch, "-m", "grpo_trainer.cli", *config, *words]
        sys.stderr.flush()
        os.execve(sys.executable, command, os.environ | {_LAUNCHED: "1"})

    def check_started(self) -> None:
        """Raise ValueError if there is something for a launcher that has not been started."""
        if self.launch and _LAUNCHED not in os.environ:
            raise ValueError(
                f"{' '.join(self.launch)}: expected no arguments of `accelerate launch` under a "
                "launcher or in Python, only for the command grpo-train"
            )


def own_configs() -> list[str]:
    """Return the names of our files for ``accelerate launch``."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def _file(name: str = "") -> str:
    own = _FOLDER / f"{name}.yaml"
    if not Path(name).is_file() and not own.is_file():
        known = ", ".join(own_configs())
        raise ValueError(f"{_NAME}: expected a file, or one of {known}; got {name!r}")
    return name if Path(name).is_file() else str(own)
