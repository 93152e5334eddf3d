"""The arguments of ``grpo-train``, as the file has them that ``--help`` prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_trainer.common.text import name_of, no_such_option

HELP = Path(__file__).with_name("help.txt")
# where other packages name options: those of another version are not in the file
_ELSEWHERE = {"transformers": "training_args.py", "accelerate": "commands/launch.py"}


def descriptions() -> dict[str, str]:
    """Return what the file says of each argument, without the default; mostly no text of others."""
    entries = re.findall(r"^  --(\w+).*?(?:  +(.+))?$((?:\n {24}.+)*)", HELP.read_text(), re.M)
    texts = {name: " ".join(f"{start}{rest}".split()) for name, start, rest in entries}
    return {name: re.sub(r" ?\(default: .*\)$", "", text) for name, text in texts.items()}


def describe_fields(kind: Any) -> None:
    """Give the fields of a dataclass the texts of the file, which a parser shows."""
    for name, text in descriptions().items():
        if text and name in kind.__dataclass_fields__:
            field = kind.__dataclass_fields__[name]
            field.metadata = {**field.metadata, "help": text.replace("%", "%%")}


def check_options(words: Sequence[str]) -> None:
    """Raise ValueError if one of the words of a command line looks like an option and is none.

    It imports none of the trainer, which takes seconds.
    """
    known = descriptions()
    # words with a space are values to argparse
    for word in (word for word in words if re.match(r"--\S+$", word)):
        name = name_of(word)
        if not any(_exists(each, known) for each in (name, name.removeprefix("no_"))):
            raise ValueError(no_such_option(word, known))


def _exists(name: str, known: dict[str, str]) -> bool:
    option = re.compile(rf'^    {re.escape(name)}:|"--{re.escape(name)}"', re.M)
    return name in known or any(option.search(_source(*place)) for place in _ELSEWHERE.items())


def _source(package: str, file: str) -> str:
    spec = find_spec(package)  # imports nothing
    folders = spec.submodule_search_locations if spec else None
    return Path(folders[0], file).read_text() if folders else ""
