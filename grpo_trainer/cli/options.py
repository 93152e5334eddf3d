"""Options that are misspelled, found without the trainer, whose imports take seconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_trainer.common import name_of, no_such_option

HELP = Path(__file__).with_name("help.txt")  # made from the parser: it names all options
# where other packages name options: those of another version are not in the file
_ELSEWHERE = {
    ("transformers", "training_args.py"): "^    {}:",
    ("accelerate", "commands/launch.py"): '"--{}"',
}


def check_options(words: Sequence[str]) -> None:
    """Raise ValueError if one of the words of a command line looks like an option and is none."""
    known = re.findall(r"^  --(\w+)", HELP.read_text(), re.M)
    # words with a space are values to argparse
    for word in (word for word in words if re.match(r"--\S+$", word)):
        name = name_of(word)
        if not any(_is_known(each, known) for each in (name, name.removeprefix("no_"))):
            raise ValueError(no_such_option(word, known))


def _is_known(name: str, known: Sequence[str]) -> bool:
    return name in known or any(
        re.search(pattern.format(re.escape(name)), _source(*where), re.M)
        for where, pattern in _ELSEWHERE.items()
    )


def _source(package: str, file: str) -> str:
    spec = find_spec(package)  # imports nothing
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0], file).read_text() if folders else ""
