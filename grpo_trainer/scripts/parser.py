"""TrlParser: dataclasses from a command line over a YAML file over their defaults."""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from grpo_trainer.common import hint, no_such_option, printable
from grpo_trainer.scripts.run_file import RunFile, read_run_file


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
            self.check_known(rest, file if fail_with_unknown_args else RunFile())
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
        known, words = first.parse_known_args(sys.argv[1:] if args is None else list(args))
        if known.config is None:
            return RunFile(), words
        actions = {action.dest: action for action in self._actions if action.dest != "help"}
        del actions["config"]
        hints: dict[str, Any] = {}
        mappings: list[str] = []
        for kind in self.dataclass_types:
            hints |= get_type_hints(kind)
            mappings += getattr(kind, "_VALID_DICT_FIELDS", ())
        mappings += [name for name, hint in hints.items() if re.search(r"\bdict\b", str(hint))]
        file = read_run_file(Path(known.config), actions, hints, mappings)
        os.environ.update(file.environment)
        self.set_defaults(**file.values)
        self._check_words(file)
        return file, words

    def _check_words(self, file: RunFile) -> None:
        """Say of what is wrong in the file that it is in the file."""
        required = [action for action in self._actions if action.required]
        for action in required:
            action.required = False  # the command line may have it
        self._source = f"--config: {file.path}: "
        self.parse_known_args(file.words)
        self._source = ""
        for action in required:
            action.required = action.dest not in file.values

    def check_known(self, rest: Sequence[str], file: RunFile) -> None:
        """Raise ValueError if there is a word in ``rest``, or a name in the file, nobody knows."""
        known = [action.dest for action in self._actions]
        for name in file.unknown:
            raise ValueError(
                f"--config: {file.path} has an unknown argument: {name}{hint(name, known)}"
            )
        for word in rest[:1]:
            if not word.startswith("--"):
                raise ValueError(f"expected --name value, got {word!r}")
            raise ValueError(no_such_option(word, known))

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr, and exit with code 2."""
        line = " ".join(f"{self._source}{message}".split())
        print(f"{self.prog}: error: {printable(line)}", file=sys.stderr)
        raise SystemExit(2)
