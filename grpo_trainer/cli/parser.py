"""Fill dataclasses from the command line, a YAML file and defaults; run ``accelerate launch``."""

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
_NAME = "accelerate_config"  # a file for `accelerate launch`, or the name of an included one
_METAVARS = {string_to_bool: "BOOL", int: "INT", float: "FLOAT"}
_LAUNCHED = "GRPO_TRAIN_LAUNCHED"  # set for the processes that we start
_OTHERS = ("RANK", "ACCELERATE_MIXED_PRECISION")  # set by torchrun and accelerate


class _Loader(yaml.SafeLoader):
    """Reads numbers as Python does (YAML 1.1 reads 1e-6 as text); no name may repeat."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is there more than once")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _read_file(path: str) -> dict[str, tuple[Any, Any]]:
    """Return each name's value, and the value with all scalars as they are written."""
    if not Path(path).is_file():
        raise ValueError(f"--config: no such file {path!r}")
    try:
        text = Path(path).read_text()
        values, texts = (yaml.load(text, Loader=kind) for kind in (_Loader, yaml.BaseLoader))
        if not isinstance(texts, dict) or not texts:
            raise ValueError("expected `name: value` lines")
        return dict(zip(texts, zip(values.values(), texts.values(), strict=True), strict=True))
    except (yaml.YAMLError, ValueError) as error:  # an unknown tag, an invalid date
        raise ValueError(f"--config: {path} cannot be read: {error}") from error
    except RecursionError as error:
        raise ValueError(f"--config: {path} is nested too deep") from error


class TrlParser(HfArgumentParser):
    """Reads dataclasses from the command line and from the YAML file that ``--config`` names.

    A flag without a value is true, and ``--no_NAME`` makes it false. Errors of the command line
    are one line on stderr, and the exit code is 2.
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        super().__init__(dataclass_types, **{"allow_abbrev": False} | kwargs)
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
        self.add_argument(
            "--config", help="YAML file with arguments; the command line overrides it."
        )

    def parse_args_and_config(self, args: Iterable[str] | None = None) -> tuple[Any, ...]:
        """Return an instance of each dataclass; ``args`` default to the process's arguments.

        Environment variables under ``env`` in the file are set first.

        Raises:
            ValueError: the file is wrong, an argument is unknown, or a value is out of range.
        """
        path, unknown, words = self.read(args)
        self._check_known(path, unknown, words)
        *found, _ = self.parse_args_into_dataclasses(words, look_for_args_file=False)
        return tuple(found)

    def read(self, args: Iterable[str] | None = None) -> tuple[str, Words, list[str]]:
        """Return the file's path, its unknown arguments, and those of the command line.

        The file's values become defaults. Plain values are read as written, so that
        ``save_strategy: no`` is the word and not a boolean.
        """
        first = OneLineParser(prog=self.prog, add_help=False)
        first.add_argument("--config")
        known, words = first.parse_known_args(None if args is None else list(args))
        if (path := known.config) is None:
            return "", {}, words
        hints = {k: v for kind in self.dataclass_types for k, v in get_type_hints(kind).items()}
        # a flag's own action comes before the one for --no_NAME
        actions = {item.dest: item for item in reversed(self._actions) if item.dest in hints}
        unknown: Words = {}
        for name, (value, text) in _read_file(path).items():
            if name in actions:
                value = self._value(path, actions[name], hints[name], value, text)
                self.set_defaults(**{name: value})
                actions[name].required = False
            elif name == "env":
                if not isinstance(text, dict) or not all(isinstance(v, str) for v in text.values()):
                    raise ValueError(f"--config: {path}: expected `NAME: value` lines in env")
                os.environ.update(text)
            else:
                unknown[name] = [str(item) for item in (text if isinstance(text, list) else [text])]
        return path, unknown, words

    def _check_known(self, path: str, unknown: Words, words: list[str]) -> None:
        """Raise ValueError if there are unknown names in a file, or on the command line."""
        known = [action.dest for action in self._actions]
        for name in unknown:
            raise ValueError(f"--config: {path} has an unknown argument: {name}{hint(name, known)}")
        for word in self.parse_known_args(words)[1][:1]:
            if not word.startswith("--"):
                raise ValueError(f"expected --name value, got {word!r}")
            option = word.partition("=")[0]
            meant = hint(option.removeprefix("--").replace("-", "_"), known)
            raise ValueError(f"{option}: unknown argument{meant}")

    def _value(self, path: str, action: Action, kind: Any, value: Any, text: Any) -> Any:
        items = text if isinstance(text, list) and action.nargs == "+" else [text]
        if items and value is not None and all(isinstance(item, str) for item in items):
            try:
                return self._get_values(action, items)
            except ArgumentError as error:
                self.error(f"--config: {path}: {error}")
        if value is None:
            allowed = type(None) in get_args(kind)
        elif isinstance(value, dict):
            allowed = re.search(r"\bdict\b", str(kind)) is not None
        else:  # lists of texts have been read by now, except empty ones
            allowed = (action.nargs != "+" or not value) and "list" in str(kind)
        if not allowed:
            got = type(value).__name__ if value is not None else "null"
            raise ValueError(f"--config: {path}: {action.dest} cannot be a {got}: {value!r}")
        return value

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr, and exit with code 2."""
        line = printable(" ".join(message.split()))
        ArgumentParser.exit(self, 2, f"{self.prog}: error: {line}\n")


class LaunchParser(TrlParser):
    """Takes out the arguments of ``accelerate launch``, in the file and on the command line."""

    launch: list[str]  # its arguments

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
        """Become ``accelerate launch`` of the same run, if any argument is for it."""
        path, unknown, words = self.read(args)
        if not self.launch or any(name in os.environ for name in (_LAUNCHED, *_OTHERS)):
            return
        self._check_known(path, unknown, words)
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        config = ["--config", path] if path else []
        command += [*self.launch, "-m", "grpo_trainer.cli", *config, *words]
        sys.stderr.flush()
        os.execve(sys.executable, command, os.environ | {_LAUNCHED: "1"})

    def check_started(self) -> None:
        """Raise ValueError if there are launcher arguments and the launcher has not been
        started."""
        if self.launch and _LAUNCHED not in os.environ:
            raise ValueError(
                f"{' '.join(self.launch)}: expected arguments of `accelerate launch` only for the "
                "command grpo-train, not under a launcher or in Python"
            )


def own_configs() -> list[str]:
    """Return the names of the included files for ``accelerate launch``."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def _file(name: str = "") -> str:
    own = _FOLDER / f"{name}.yaml"
    if not Path(name).is_file() and not own.is_file():
        known = ", ".join(own_configs())
        raise ValueError(f"{_NAME}: expected a file, or one of {known}; got {name!r}")
    return name if Path(name).is_file() else str(own)
