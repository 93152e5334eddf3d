"""``grpo-train --help`` and ``--version``, and options that are misspelled: without the trainer.

Its imports take seconds. So the help is a file, made from the parser by ``cli.help_file``; it has
the names of all options, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_trainer.common import name_of, no_such_option

HELP = Path(__file__).with_name("help.txt")
# where other packages name options: those of another version are not in the file
_ELSEWHERE = {
    ("transformers", "training_args.py"): "^    {}:",
    ("accelerate", "commands/launch.py"): '"--{}"',
}


def answer(words: Sequence[str]) -> None:
    """Print what the words ask for and leave, if it takes no more than the file.

    Raises:
        ValueError: one of the words is no option.
    """
    text = HELP.read_text()
    if "--version" in words:
        from grpo_kernels.version import VERSION

        print(f"grpo-train {VERSION}")
    elif "--help" in words or "-h" in words:
        print(text, end="")
    else:
        known = re.findall(r"^  --(\w+)", text, re.M)
        # words with a space are values to argparse
        for word in (word for word in words if re.match(r"--\S+$", word)):
            name = name_of(word)
            if not any(_is_known(each, known) for each in (name, name.removeprefix("no_"))):
                raise ValueError(no_such_option(word, known))
        return
    raise SystemExit(0)


def _is_known(name: str, known: Sequence[str]) -> bool:
    return name in known or any(
        re.search(pattern.format(re.escape(name)), _source(*where), re.M)
        for where, pattern in _ELSEWHERE.items()
    )


def _source(package: str, file: str) -> str:
    spec = find_spec(package)  # imports nothing
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0], file).read_text() if folders else ""
