"""``grpo-train`` starts ``accelerate launch`` where its arguments are among the run's."""

from __future__ import annotations

import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser
from collections.abc import Iterable
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from transformers.hf_argparser import string_to_bool

from grpo_trainer.cli.parser import RunFile, TrlParser

_FOLDER = Path(__file__).parents[1] / "accelerate_configs"
_NAME = "accelerate_config"  # a file for `accelerate launch`, or the name of one of ours
_LAUNCHED = "GRPO_TRAIN_LAUNCHED"  # is set for the processes that are started
_OTHERS = ("RANK", "ACCELERATE_MIXED_PRECISION")  # are set by torchrun and accelerate


class LaunchParser(TrlParser):
    """Takes out what belongs to ``accelerate launch``, in the file and on the command line."""

    launch: list[str]  # words for it

    def read(self, args: Iterable[str] | None = None) -> tuple[RunFile, list[str]]:
        file, words = super().read(args)
        flags = launch_command_parser()._option_string_actions
        names = {_NAME} | {flag.removeprefix("--") for flag in flags if re.match(r"--\w+$", flag)}
        names -= {action.dest for action in self._actions}
        launcher = ArgumentParser(add_help=False, allow_abbrev=False, argument_default=SUPPRESS)
        for name in names:
            launcher.add_argument(f"--{name}", f"--{name.replace('_', '-')}", nargs="*")
        on_line, words = launcher.parse_known_args(words)
        in_file = {name: item for name, item in file.unknown.items() if name in names}
        self.launch = []
        for name, item in (in_file | vars(on_line)).items():  # the command line overrides the file
            self.launch += _written(name, item, flags)
        others = {name: item for name, item in file.unknown.items() if name not in names}
        return RunFile(file.path, others), words

    def start_if_asked(self, args: Iterable[str]) -> None:
        """Become ``accelerate launch`` of the same run, if there is something for it."""
        file, words = self.read(args)
        if not self.launch or any(name in os.environ for name in (_LAUNCHED, *_OTHERS)):
            return
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        config = ["--config", file.path] if file.path else []
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


def _written(name: str, values: list[str], flags: dict[str, Action]) -> list[str]:
    if name == _NAME:
        return ["--config_file", _file(*values[:1])]
    if flags[f"--{name}"].nargs == 0:  # a flag, which a file gives a value
        return [f"--{name}"] if all(map(string_to_bool, values)) else []
    return [f"--{name}", *values]


def own_configs() -> list[str]:
    """Return the names of our files for ``accelerate launch``."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def _file(name: str = "") -> str:
    own = _FOLDER / f"{name}.yaml"
    if not Path(name).is_file() and not own.is_file():
        known = ", ".join(own_configs())
        raise ValueError(f"{_NAME}: expected a file, or one of {known}; got {name!r}")
    return name if Path(name).is_file() else str(own)
