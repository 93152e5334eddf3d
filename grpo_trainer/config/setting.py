"""A field of GRPOConfig with its line of ``grpo-train --help``, and names that are no field."""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Any, Self

from grpo_trainer.common import hint

# for a field that is true or false and None by default: a flag without a value is true
FLAG = {"nargs": "?", "const": True}


def setting(default: Any, text: str, **metadata: Any) -> Any:
    """Return a dataclass field; ``metadata`` is for its argument on the command line."""
    return field(default=default, metadata={"help": text, **metadata})


class NamedFields:
    """Says which field was meant, as the command line does, where the constructor knows none.

    Raises:
        TypeError: there is no such argument.
    """

    def __new__(cls, *args: Any, **values: Any) -> Self:
        taken = inspect.signature(cls.__init__).parameters
        takes_all = any(item.kind is item.VAR_KEYWORD for item in taken.values())
        for name in values:
            if name not in taken and not takes_all:
                raise TypeError(
                    f"{cls.__name__}.__init__() got an unexpected keyword argument {name!r}"
                    f"{hint(name, taken)}"
                )
        return super().__new__(cls)
