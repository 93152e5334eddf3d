"""``python -m grpo_trainer.cli.help`` writes the file that ``grpo-train --help`` prints."""

from __future__ import annotations

import copy
import inspect
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter
from importlib.metadata import version

from transformers.hf_argparser import string_to_bool

from grpo_trainer.cli import HELP
from grpo_trainer.cli.arguments import RunArguments
from grpo_trainer.cli.parser import own_configs
from grpo_trainer.cli.train import run_parser
from grpo_trainer.config import GRPOConfig

_KINDS = {string_to_bool: "BOOL", int: "INT", float: "FLOAT"}
_WIDTH = 80
_START = """\
usage: grpo-train --model_name_or_path MODEL --dataset_name DATA --reward_funcs NAME ...
                  [--name value ...] [--config RUN.yaml]
       grpo-train serve --model MODEL   a vLLM server to sample from
       grpo-train report RUN [RUN ...]  the report of a run, or of several side by side

Trains a model by GRPO. A boolean without a value is true; --no_NAME is short for
--NAME false. A dash may stand for each underscore.

The command:
  --config FILE         YAML file with arguments; the command line overrides it.
  --accelerate_config FILE
                        Start processes by `accelerate launch`, with its file or
                        one of ours:
                        CONFIGS.
                        Its options, such as --num_processes, are taken too.
  --version             Print the version.
  --help                Print this.
"""


def help_text() -> str:
    """Return the help, with a section for each class that has arguments."""
    formatter = ArgumentDefaultsHelpFormatter("grpo-train", width=_WIDTH)
    actions = {item.dest: item for item in reversed(run_parser()._actions)}
    for kind in (*reversed(RunArguments.__mro__), *GRPOConfig.__mro__):
        own = [actions.pop(name) for name in inspect.get_annotations(kind) if name in actions]
        if own:
            package = kind.__module__.partition(".")[0]
            is_ours = package == "grpo_trainer"
            heading = (kind.__doc__ or "").partition(".")[0].replace("``", "")
            if not is_ours:
                where = f"`python -m pydoc {package}.{kind.__name__}` has more"
                heading = f"Of {package} {version(package)}; {where}"
            formatter.start_section(heading)
            formatter.add_arguments(_shown(action, is_ours) for action in own)
            formatter.end_section()
    return _START.replace("CONFIGS", ", ".join(own_configs())) + "\n" + formatter.format_help()


def _shown(action: Action, described: bool) -> Action:
    """Return the argument as the help shows it: one spelling, what it takes, a default if any."""
    action = copy.copy(action)
    action.option_strings = action.option_strings[:1]
    action.metavar = _KINDS.get(action.type, "TEXT")
    if not described:
        action.help = None
    elif action.choices is not None:
        action.help = f"{action.help} One of %(choices)s."
    if action.default is None:
        action.default = SUPPRESS
    return action


if __name__ == "__main__":
    HELP.write_text(help_text())
